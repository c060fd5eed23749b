"""A connector that pulls the KV of prompts from prefill nodes, as NIXL's and Mooncake's do."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

    from .late import LateTransfer

# What a request has that a prefill node has computed the prompt of.
PARAMS = {"do_remote_prefill": True}


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Tokens to pull, from ``first`` to ``end``, and the request's block tables."""

    request_id: str
    tables: tuple[list[int], ...]
    first: int
    end: int


class Prompts(KVConnectorMetadata):
    """What to begin in a step."""

    def __init__(self, prompts: list[Prompt]) -> None:
        self.prompts = prompts


class Pull(KVConnectorBase_V1, SupportsHMA):
    """Both roles.

    Attributes:
        begin: Begins to pull a prompt into a worker's KV caches.
    """

    begin: Callable[[Prompt], LateTransfer]

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        # vLLM computes the last token of a prompt again if it was pulled, but has no block for the
        # first token of its window.
        specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
        self._without_last = not all(isinstance(spec, FullAttentionSpec) for spec in specs)
        ranks = vllm_config.parallel_config.decode_context_parallel_size
        self._block_tokens = specs[0].block_size * ranks
        self._prompts: list[Prompt] = []
        self._under_way: list[tuple[Prompt, LateTransfer]] = []
        self._failed: list[Prompt] = []

    # ---- scheduler role ----

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        """All of a prompt that has not been pulled."""
        num_tokens = self._end(request) - num_computed_tokens
        return (num_tokens, True) if _is_remote(request) and num_tokens > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Plans to pull it, once."""
        if _is_remote(request):
            request.kv_transfer_params["do_remote_prefill"] = False
            tables, end = blocks.get_block_ids(), self._end(request)
            if num_external_tokens:
                first = end - num_external_tokens
                self._prompts.append(Prompt(request.request_id, tables, first, end))

    def _end(self, request: Request) -> int:
        return request.num_prompt_tokens - self._without_last

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Prompts:
        """What the workers have to begin."""
        prompts, self._prompts = self._prompts, []
        return Prompts(prompts)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Nothing is sent."""
        return False, None

    # ---- worker role ----

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Begins."""
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, Prompts)
        self._under_way += [(prompt, self.begin(prompt)) for prompt in metadata.prompts]

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str]]:
        """What has come."""
        polled = [(prompt, pull, pull.poll()) for prompt, pull in self._under_way]
        self._under_way = [(prompt, pull) for prompt, pull, result in polled if result is None]
        self._failed += [prompt for prompt, _, result in polled if result and not result.ok]
        return None, {prompt.request_id for prompt, _, result in polled if result}

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        """What has come, and what has not, for a vLLM that takes both by request."""
        results = super().get_transfer_results(finished_req_ids)
        results.failed_recving |= {prompt.request_id for prompt in self._failed}
        self._failed.clear()
        return results

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks of what has not come, for a vLLM that takes blocks."""
        failed, self._failed = self._failed, []
        return {
            block
            for prompt in failed
            for table in prompt.tables
            for block in table[prompt.first // self._block_tokens :]
        }

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Nothing."""

    def save_kv_layer(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def wait_for_save(self) -> None:
        """Nothing."""


def _is_remote(request: Request) -> bool:
    return bool((request.kv_transfer_params or {}).get("do_remote_prefill"))
