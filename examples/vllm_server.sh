#!/usr/bin/env bash
# A server with stock vLLM. Usage: examples/vllm_server.sh MODEL [more flags of vllm serve]
set -euo pipefail
model=$1
shift
exec vllm serve "$model" "$@" \
--scheduler-cls preempt_offload.RecomputeScheduler \
--kv-transfer-config '{
  "kv_connector": "PreemptOffloadConnector",
  "kv_connector_module_path": "preempt_offload",
  "kv_role": "kv_both",
  "kv_connector_extra_config": {
    "cpu_bytes_to_use_per_rank": 17179869184
  },
  "kv_load_failure_policy": "recompute"
}'
