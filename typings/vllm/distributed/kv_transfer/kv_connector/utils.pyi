from vllm.config import VllmConfig

class AttentionBackend:
    @staticmethod
    def get_name() -> str: ...

def get_current_attn_backends(vllm_config: VllmConfig) -> list[type[AttentionBackend]]: ...
