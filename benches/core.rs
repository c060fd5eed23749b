//! What a preemption costs the scheduler, and how fast host copies are.
//!
//! Each group has what it should be compared with in it, so that ratios come from one run:
//!
//! ```text
//! cargo bench --bench core -- --quick
//! ```

use std::hint::black_box;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use preempt_offload::block_pool::{BlockKey, BlockPool};
use preempt_offload::host_copy;
use preempt_offload::request_table::{BlockPair, Group, RequestTable};
use preempt_offload::transfer::{BlockLayout, Descriptors, Direction, Region, Segment};

/// Blocks of the host pool.
const CAPACITY: u32 = 16_384;
/// Blocks of a preempted request, and tokens per block.
const BLOCKS: u32 = 1024;
const BLOCK_TOKENS: u64 = 128;
const LAYERS: u64 = 32;

/// Claims a run of blocks and gives it back; beside it, a locked stack of free ids that
/// counts no references and checks nothing.
fn pool(c: &mut Criterion) {
    let mut group = c.benchmark_group("pool");
    for n in [16, 128, 1024] {
        group.throughput(Throughput::Elements(n as u64));
        let pool = BlockPool::new(CAPACITY, false);
        group.bench_function(BenchmarkId::new("claim_release", n), |b| {
            b.iter(|| pool.release(&black_box(pool.claim(n).unwrap())).unwrap());
        });
        let indexed = BlockPool::new(CAPACITY, true);
        group.bench_function(BenchmarkId::new("claim_release_of_an_indexed_pool", n), |b| {
            b.iter(|| indexed.release(&black_box(indexed.claim(n).unwrap())).unwrap());
        });
        let stack = Mutex::new((1..=CAPACITY).rev().collect::<Vec<_>>());
        group.bench_function(BenchmarkId::new("locked_stack", n), |b| {
            b.iter(|| {
                let ids = {
                    let mut free = stack.lock().unwrap();
                    let rest = free.len() - n;
                    free.split_off(rest)
                };
                stack.lock().unwrap().extend(black_box(ids));
            });
        });
    }
    group.bench_function("claim_of_1024_that_evicts_them", |b| {
        let pool = BlockPool::new(CAPACITY, true);
        let keys: Vec<_> =
            (0..CAPACITY).map(|i| BlockKey::new(&i.to_le_bytes(), 0).unwrap()).collect();
        // All blocks are evictable whenever the clock runs.
        let fill = || {
            let ids = pool.claim(pool.num_free()).unwrap();
            for id in &ids {
                assert!(pool.index(*id, &keys[*id as usize - 1]).unwrap());
            }
            pool.release(&ids).unwrap();
        };
        let claim = || drop(black_box(pool.claim(1024).unwrap()));
        let release = || {
            pool.clear_index();
            let owned = (1..=CAPACITY).filter(|&id| pool.ref_count(id) == Ok(1));
            pool.release(&owned.collect::<Vec<_>>()).unwrap();
        };
        b.iter_custom(|n| time_only(n, fill, claim, release));
    });
    group.finish();
}

/// One request with a device block table of `blocks` neighbours and every block hashed.
struct Scheduler {
    table: RequestTable,
    device: Vec<Vec<u32>>,
    keys: Vec<Vec<BlockKey>>,
}

impl Scheduler {
    fn new(indexed: bool) -> Self {
        let pool = Arc::new(BlockPool::new(CAPACITY, indexed));
        let hash = |i: u64| [i; 4].map(u64::to_le_bytes).concat();
        let keys = (0..u64::from(BLOCKS)).map(|i| BlockKey::new(&hash(i), 0).unwrap());
        Self {
            table: RequestTable::new(pool, vec![Group::attention(BLOCK_TOKENS)]),
            device: vec![(1..=BLOCKS).collect()],
            keys: if indexed { vec![keys.collect()] } else { vec![] },
        }
    }

    fn begin_store(&self, blocks: u32) {
        let tokens = u64::from(blocks) * BLOCK_TOKENS;
        let device = [self.device[0][..blocks as usize].to_vec()];
        black_box(self.table.begin_store("request", 0, tokens, &device, &self.keys).unwrap());
    }

    fn complete_store(&self) {
        self.table.complete_store("request", 0, true).unwrap();
    }

    fn begin_load(&self, blocks: u32) {
        let tokens = u64::from(blocks) * BLOCK_TOKENS;
        black_box(self.table.begin_load("request", 0, tokens, &self.device).unwrap());
    }

    fn finish_load(&self) {
        self.table.finish_load("request", true).unwrap();
    }

    fn release(&self) {
        self.table.release("request").unwrap();
    }
}

/// Times `f` only, of the steps that lead to it and from it.
fn time_only(
    n: u64,
    mut before: impl FnMut(),
    mut f: impl FnMut(),
    mut after: impl FnMut(),
) -> Duration {
    let mut total = Duration::ZERO;
    for _ in 0..n {
        before();
        let begin = Instant::now();
        f();
        total += begin.elapsed();
        after();
    }
    total
}

fn nothing() {}

/// The scheduler's calls for one preemption of a request of 1,024 blocks.
fn preemption(c: &mut Criterion) {
    let mut group = c.benchmark_group("preemption_of_1024_blocks");
    let s = Scheduler::new(false);
    let ready = |blocks| {
        s.begin_store(blocks);
        s.complete_store();
    };
    let mirrored = |blocks| {
        ready(blocks);
        s.begin_load(blocks);
        s.finish_load();
    };
    group.bench_function("plan_store", |b| {
        let gone = || {
            s.complete_store();
            s.release();
        };
        b.iter_custom(|n| time_only(n, nothing, || s.begin_store(BLOCKS), gone));
    });
    group.bench_function("plan_second_store_from_mirror", |b| {
        // All but the last 8 blocks are on the host already.
        let gone = || {
            s.complete_store();
            s.release();
        };
        b.iter_custom(|n| time_only(n, || mirrored(BLOCKS - 8), || s.begin_store(BLOCKS), gone));
    });
    group.bench_function("plan_restore", |b| {
        let gone = || {
            s.finish_load();
            s.release();
        };
        b.iter_custom(|n| time_only(n, || ready(BLOCKS), || s.begin_load(BLOCKS), gone));
    });
    group.bench_function("clean_up", |b| {
        b.iter_custom(|n| time_only(n, || ready(BLOCKS), || s.release(), nothing));
    });
    group.finish();

    let mut group = c.benchmark_group("preemption_of_1024_blocks_with_prefix_caching");
    let s = Scheduler::new(true);
    let forget = || s.table.release_all().unwrap();
    group.bench_function("plan_store", |b| {
        let gone = || {
            s.complete_store();
            forget();
        };
        b.iter_custom(|n| time_only(n, nothing, || s.begin_store(BLOCKS), gone));
    });
    group.bench_function("complete_store", |b| {
        let complete = || s.complete_store();
        b.iter_custom(|n| time_only(n, || s.begin_store(BLOCKS), complete, forget));
    });
    group.bench_function("plan_store_of_what_others_have_stored", |b| {
        s.begin_store(BLOCKS);
        s.complete_store();
        let tokens = u64::from(BLOCKS) * BLOCK_TOKENS;
        let share = || {
            let plan = s.table.begin_store("other", 1, tokens, &s.device, &s.keys).unwrap();
            assert_eq!(black_box(plan).shared, BLOCKS as usize);
        };
        let gone = || {
            s.table.complete_store("other", 1, true).unwrap();
            s.table.release("other").unwrap();
        };
        b.iter_custom(|n| time_only(n, nothing, share, gone));
        forget();
    });
    group.finish();
}

/// Pairs of neighbours on both sides, or of blocks that have no neighbour.
fn pairs(blocks: u32, scattered: bool) -> Vec<BlockPair> {
    let step = if scattered { 2 } else { 1 };
    (0..blocks).map(|i| BlockPair { group: 0, device: 1 + i * step, host: 1 + i * step }).collect()
}

/// Device and host memory of `LAYERS` layers, and the layout of both.
fn layout(device: u64, host: u64, blocks: u32, bytes: u64) -> BlockLayout {
    let layer_bytes = u64::from(blocks) * bytes;
    let segment = |layer| Segment {
        group: 0,
        device: device + layer * layer_bytes,
        stride: bytes,
        bytes,
        host: host + layer * layer_bytes,
        host_stride: bytes,
    };
    let segments: Vec<_> = (0..LAYERS).map(segment).collect();
    let region = |start| [Region { start, len: LAYERS * layer_bytes }];
    BlockLayout::new(blocks, blocks, 1, &segments, &region(device), &region(host)).unwrap()
}

/// Descriptors of 1,024 pairs in 32 layers.
fn descriptors(c: &mut Criterion) {
    let mut group = c.benchmark_group("descriptors_of_1024_pairs_in_32_layers");
    group.throughput(Throughput::Elements(u64::from(BLOCKS) * LAYERS));
    let layout = layout(1 << 40, 1 << 41, 4 * BLOCKS, 1 << 16);
    for (name, scattered) in [("coalesced", false), ("scattered", true)] {
        let pairs = pairs(BLOCKS, scattered);
        group.bench_function(name, |b| {
            b.iter(|| layout.descriptors(Direction::DeviceToHost, black_box(&pairs)).unwrap());
        });
    }
    group.finish();
}

/// Copies 32 MiB, in long runs or block by block, beside one plain copy of as much.
fn copies(c: &mut Criterion) {
    let (blocks, bytes) = (64, 16 << 10);
    let total = u64::from(blocks) * LAYERS * bytes;
    let room = 2 * u64::from(blocks) + 1;
    let mut device = vec![1_u8; (room * LAYERS * bytes) as usize];
    let mut host = vec![2_u8; (room * LAYERS * bytes) as usize];
    let mut group = c.benchmark_group("host_copy_of_32_MiB");
    group.throughput(Throughput::Bytes(total));
    group.bench_function("memcpy", |b| {
        let n = total as usize;
        b.iter(|| host[..n].copy_from_slice(black_box(&device[..n])));
    });
    let [from, to] = [&mut device, &mut host].map(|memory| memory.as_mut_ptr() as usize as u64);
    let layout = layout(from, to, room as u32, bytes);
    for (name, scattered) in [("coalesced", false), ("scattered", true)] {
        let pairs = pairs(blocks, scattered);
        // Device block 0 is the null block, so these begin at 1 on both sides.
        let copies: Descriptors = layout.descriptors(Direction::DeviceToHost, &pairs).unwrap();
        assert_eq!(copies.total_bytes(), total);
        for threads in [1, 2] {
            group.bench_function(BenchmarkId::new(name, threads), |b| {
                // SAFETY: `device` and `host` live to the end and nothing else uses them.
                b.iter(|| unsafe { host_copy::copy(black_box(&copies), threads) });
            });
        }
    }
    group.finish();
    drop((device, host));
}

criterion_group!(benches, pool, preemption, descriptors, copies);
criterion_main!(benches);
