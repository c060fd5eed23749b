#!/usr/bin/env bash
# A decode node of vllm-ascend. Usage: examples/ascend/decode_node.sh MODEL [more flags of vllm serve]
# Set kv_port, prefill and decode to what your nodes use; see docs/ascend.md.
set -euo pipefail
model=$1
shift
exec vllm serve "$model" "$@" \
--additional-config '{
  "recompute_scheduler_enable": true,
  "scheduler_config": {
    "recompute_scheduler_enable": true
  }
}' \
--kv-transfer-config '{
  "kv_connector": "MultiConnector",
  "kv_role": "kv_consumer",
  "kv_connector_extra_config": {
    "connectors": [
      {
        "kv_connector": "MooncakeConnectorV1",
        "kv_role": "kv_consumer",
        "kv_port": "28000",
        "kv_connector_extra_config": {
          "prefill": {
            "dp_size": 1,
            "tp_size": 1
          },
          "decode": {
            "dp_size": 1,
            "tp_size": 1
          }
        }
      },
      {
        "kv_connector": "PreemptOffloadConnector",
        "kv_connector_module_path": "preempt_offload",
        "kv_role": "kv_consumer",
        "kv_connector_extra_config": {
          "cpu_bytes_to_use_per_rank": 17179869184
        }
      }
    ]
  }
}'
