import enum

class CacheHitSource(enum.Enum):
    P2P = "p2p"
