//! The core of preempt-offload: keeps the KV cache of preempted requests on the host.
//!
//! | module | what it does |
//! |---|---|
//! | [`block_pool`] | which host block is whose: lock-free claim, release, sharing by hash |
//! | [`request_table`] | request to host blocks, and the state machine of a preserved request |
//! | [`completion`] | which transfers every worker has reported |
//! | [`transfer`] | block pairs to coalesced, bounds-checked copy descriptors |
//! | [`host_copy`] | carries descriptors out, where the KV cache is in host memory |
//! | [`sync`] | atomics from `std` or loom |
//! | `python` | the Python bindings, behind the feature of that name |
//!
//! The first three are lock-free and `Sync`: schedulers, copy threads and metrics
//! readers use them at once. Nothing here knows Python except `python`.

pub mod block_pool;
pub mod completion;
mod cow_map;
#[cfg(not(loom))]
pub mod host_copy;
#[cfg(feature = "python")]
mod python;
pub mod request_table;
pub mod sync;
pub mod transfer;
