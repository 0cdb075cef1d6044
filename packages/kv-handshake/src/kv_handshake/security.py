"""Encryption of the side channel: CURVE keys, and the files that hold them."""

from kv_handshake.sockets import ClientSecurity, ServerSecurity, generate_keypair

__all__ = ["ClientSecurity", "ServerSecurity", "generate_keypair"]
