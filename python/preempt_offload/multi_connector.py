"""vLLM's MultiConnector, with priority for preserved requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector

from preempt_offload import compat

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from preempt_offload.connector import PreemptOffloadConnector


class PreemptOffloadMultiConnector(MultiConnector):
    """Combines connectors as ``MultiConnector`` does, in any order.

    vLLM's own asks its children one after another, and the first that has KV of a request
    loads it. That may be a prefix cache, which has less of a preempted request than was
    preserved: never the tokens of its last, partial block. Here a preserved request is the
    matter of the ``PreemptOffloadConnector`` among the children alone.

    Raises:
        ValueError: There is no such child, or vLLM's hybrid KV cache manager is on and one of
            the children does not support it.
    """

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        transfer = vllm_config.kv_transfer_config
        # Only for a connector that is called "MultiConnector" vLLM asks the children itself.
        hybrid = not vllm_config.scheduler_config.disable_hybrid_kv_cache_manager
        if hybrid and not self.all_children_support_hma(transfer):
            names = [child["kv_connector"] for child in _children(transfer)]
            raise ValueError(
                "a child of PreemptOffloadMultiConnector does not support vLLM's hybrid KV cache "
                f"manager: add --disable-hybrid-kv-cache-manager (children: {names})"
            )
        super().__init__(vllm_config, role, kv_cache_config)
        preserving = [i for i, c in enumerate(self._connectors) if compat.find_offload_connector(c)]
        if not preserving:
            raise ValueError(
                "PreemptOffloadMultiConnector has no PreemptOffloadConnector among its connectors: "
                "add one, or use MultiConnector"
            )
        self._offload_child = preserving[0]
        self._offload: PreemptOffloadConnector = self._connectors[self._offload_child]

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """Tokens that a child can load beyond ``num_computed_tokens``."""
        if self._offload.has_preempted_request(request.request_id):
            found = self._offload.get_num_new_matched_tokens(request, num_computed_tokens)
            if found != (0, False):
                self._requests_to_connector[request.request_id] = self._offload_child
                return found
        answer: tuple[int | None, bool] = super().get_num_new_matched_tokens(
            request, num_computed_tokens
        )
        return answer

    # ---- the hooks, for schedulers that look for them here only ----

    def update_state_before_preempt(
        self, request: Request, block_ids: tuple[list[int], ...], num_computed_tokens: int
    ) -> bool:
        """Plans to store a request about to be preempted; whether it is preserved."""
        return self._offload.update_state_before_preempt(request, block_ids, num_computed_tokens)

    def has_preempted_request(self, req_id: str) -> bool:
        """Whether the request's KV is on the host to be restored."""
        return self._offload.has_preempted_request(req_id)

    def has_pending_transfers(self) -> bool:
        """Whether copies are under way; the engine must go on stepping."""
        return self._offload.has_pending_transfers()


def _children(transfer: Any) -> list[dict[str, Any]]:
    children: list[dict[str, Any]] = transfer.kv_connector_extra_config.get("connectors") or []
    return children
