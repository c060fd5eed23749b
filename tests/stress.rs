//! Many threads at once, for long enough to meet what small models do not reach:
//!
//! ```text
//! cargo test --release --test stress -- --nocapture
//! ```
#![cfg(not(loom))]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Instant;

use preempt_offload::block_pool::{BlockId, BlockKey, BlockPool};
use preempt_offload::request_table::{CopyPlan, Group, RequestTable, TableError};

const THREADS: usize = 8;

/// Numbers that look random (Marsaglia's xorshift64).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u32) -> u32 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % u64::from(n)) as u32
    }
}

fn key(n: u32) -> BlockKey {
    BlockKey::new(&n.to_le_bytes(), 0).unwrap()
}

/// Runs `f(thread, random)` in `THREADS` threads and reports what they did.
fn run(name: &str, f: impl Fn(u32, &mut Random) -> u64 + Sync) -> u64 {
    let begin = Instant::now();
    let operations = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..THREADS as u32)
            .map(|t| {
                let f = &f;
                scope.spawn(move || f(t, &mut Random(0x9e37_79b9_7f4a_7c15 ^ u64::from(t))))
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).sum()
    });
    println!("{name}: {operations} operations, {THREADS} threads, {:.1?}", begin.elapsed());
    operations
}

/// Who has a block, told apart from what the pool says.
#[derive(Default)]
struct Owner {
    /// The thread that claimed it, plus one; 0: nobody.
    claimed_by: AtomicU32,
    /// Threads that found it by its key and use it.
    finders: AtomicUsize,
    /// The key it is indexed by, while it is.
    content: AtomicU32,
}

#[test]
#[cfg_attr(debug_assertions, ignore = "needs --release")]
fn no_block_has_two_owners() {
    const CAPACITY: u32 = 300;
    const KEYS: u32 = 200;
    const CALLS: u64 = 4_000_000;
    let pool = BlockPool::new(CAPACITY, true);
    let owners: Vec<Owner> = (0..=CAPACITY).map(|_| Owner::default()).collect();
    let owner = |id: BlockId| &owners[id as usize];

    let operations = run("pool", |thread, random| {
        let tag = thread + 1;
        let give_up = |ids: &[BlockId]| {
            for &id in ids {
                assert_eq!(owner(id).claimed_by.swap(0, Ordering::AcqRel), tag);
            }
        };
        let mut claimed: VecDeque<Vec<BlockId>> = VecDeque::new();
        let mut found: VecDeque<(BlockId, u32)> = VecDeque::new();
        let stop_using = |(id, content)| {
            assert_eq!(owner(id).content.load(Ordering::Acquire), content);
            owner(id).finders.fetch_sub(1, Ordering::AcqRel);
            pool.release(&[id]).unwrap();
        };
        let mut calls = 0;
        while calls < CALLS {
            match random.below(10) {
                0..3 => {
                    calls += 1;
                    let Ok(ids) = pool.claim(random.below(8) as usize + 1) else { continue };
                    for &id in &ids {
                        assert_eq!(owner(id).claimed_by.swap(tag, Ordering::AcqRel), 0);
                        assert_eq!(owner(id).finders.load(Ordering::Acquire), 0);
                        owner(id).content.store(u32::MAX, Ordering::Release);
                    }
                    claimed.push_back(ids);
                }
                3 => {
                    // Two references, given back one by one.
                    let Some(ids) = claimed.front() else { continue };
                    pool.retain(ids).unwrap();
                    pool.release(ids).unwrap();
                    calls += 2;
                    assert!(ids.iter().all(|&id| pool.ref_count(id) == Ok(1)));
                }
                4 => {
                    // Found by others as soon as it is indexed, and evictable after that.
                    let Some(ids) = claimed.pop_front() else { continue };
                    for &id in &ids {
                        let content = random.below(KEYS);
                        owner(id).content.store(content, Ordering::Release);
                        let _ = pool.index(id, &key(content)).unwrap();
                        calls += 1;
                    }
                    give_up(&ids);
                    pool.release(&ids).unwrap();
                    calls += 1;
                }
                _ => {
                    calls += 1;
                    let content = random.below(KEYS);
                    let Some(id) = pool.lookup(&key(content)) else { continue };
                    owner(id).finders.fetch_add(1, Ordering::AcqRel);
                    assert_eq!(owner(id).content.load(Ordering::Acquire), content);
                    found.push_back((id, content));
                }
            }
            if claimed.len() > 4 {
                let ids = claimed.pop_front().unwrap();
                give_up(&ids);
                pool.release(&ids).unwrap();
                calls += 1;
            }
            if found.len() > 6 {
                stop_using(found.pop_front().unwrap());
                calls += 1;
            }
            if thread == 0 && random.below(5000) == 0 {
                pool.clear_index();
                calls += 1;
            }
        }
        for ids in claimed {
            give_up(&ids);
            pool.release(&ids).unwrap();
        }
        found.into_iter().for_each(stop_using);
        calls
    });

    assert!(operations >= 10_000_000);
    assert_eq!(pool.num_available(), CAPACITY as usize);
    pool.clear_index();
    assert_eq!((pool.num_free(), pool.num_evictable()), (CAPACITY as usize, 0));
    let mut all = pool.claim(CAPACITY as usize).unwrap();
    all.sort_unstable();
    assert_eq!(all, (1..=CAPACITY).collect::<Vec<_>>());
}

/// Tokens per block of the two groups.
const BLOCK_TOKENS: [u64; 2] = [16, 8];
/// Requests that each thread drives; any thread may release them.
const REQUESTS: u32 = 4;

/// A request and its KV on the device: the content of a block is a number that tells the
/// request (or the key, where it has one), the position and, in the last block, how full
/// it is.
struct Request {
    id: String,
    number: u32,
    /// Counts the requests that have had the id.
    life: u32,
    num_tokens: u64,
}

impl Request {
    fn content(&self, group: usize, position: usize) -> u64 {
        let tokens =
            (self.num_tokens - position as u64 * BLOCK_TOKENS[group]).min(BLOCK_TOKENS[group]);
        let full = tokens == BLOCK_TOKENS[group];
        let whose =
            if full && position < 3 { self.number % 3 } else { 100 * self.life + self.number };
        u64::from(whose) << 32 | (group as u64) << 24 | (position as u64) << 8 | tokens
    }

    /// The device block at each position, which names group and position.
    fn device(&self) -> Vec<Vec<u32>> {
        let blocks = |group: usize| {
            let positions = self.num_tokens.div_ceil(BLOCK_TOKENS[group]) as u32;
            (0..positions).map(|position| (group as u32) << 16 | (position + 1)).collect()
        };
        (0..BLOCK_TOKENS.len()).map(blocks).collect()
    }

    /// The keys of the first three blocks of each group, as far as they are full.
    fn keys(&self) -> Vec<Vec<BlockKey>> {
        let keys = |group: usize| {
            let full = (self.num_tokens / BLOCK_TOKENS[group]).min(3) as usize;
            let hash = |position| self.content(group, position).to_le_bytes();
            (0..full).map(|p| BlockKey::new(&hash(p), group as u16).unwrap()).collect()
        };
        (0..BLOCK_TOKENS.len()).map(keys).collect()
    }

    /// Host block and content of each pair of a plan.
    fn copies(&self, plan: &CopyPlan) -> Vec<(usize, u64)> {
        let copies = plan.pairs.iter().map(|pair| {
            let (group, position) = (pair.group as usize, (pair.device & 0xffff) as usize - 1);
            (pair.host as usize, self.content(group, position))
        });
        copies.collect()
    }
}

#[test]
#[cfg_attr(debug_assertions, ignore = "needs --release")]
fn every_load_gets_what_was_stored() {
    const CAPACITY: u32 = 160;
    const ROUNDS: u32 = 300_000;
    let pool = Arc::new(BlockPool::new(CAPACITY, true));
    let table = RequestTable::new(pool.clone(), BLOCK_TOKENS.map(Group::attention).to_vec());
    let host: Vec<AtomicU64> = (0..=CAPACITY).map(|_| AtomicU64::new(0)).collect();
    let loads = AtomicUsize::new(0);
    let from_mirror = AtomicUsize::new(0);
    let shared = AtomicUsize::new(0);
    let id = |number: u32| format!("request-{number}");

    let operations = run("table", |thread, random| {
        let mut requests: Vec<_> = (0..REQUESTS)
            .map(|i| thread * REQUESTS + i)
            .map(|number| Request { id: id(number), number, life: 1, num_tokens: 1 })
            .collect();
        let mut calls = 0;
        for round in 0..ROUNDS {
            let request = &mut requests[random.below(REQUESTS) as usize];
            calls += 1;
            match table.status(&request.id).map(|(state, tokens)| (state.name(), tokens)) {
                None | Some(("Mirrored", _)) => {
                    // Runs on, or is another request by now; then what it had goes first.
                    request.num_tokens += u64::from(random.below(20));
                    if request.num_tokens > 120 {
                        request.num_tokens = 1 + u64::from(random.below(40));
                        request.life += 1;
                        table.release(&request.id).unwrap();
                        calls += 1;
                    }
                    let event = u64::from(round);
                    let (device, keys) = (request.device(), request.keys());
                    let plan =
                        table.begin_store(&request.id, event, request.num_tokens, &device, &keys);
                    calls += 1;
                    let plan = match plan {
                        Ok(plan) => plan,
                        Err(TableError::Capacity { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    from_mirror.fetch_add(plan.mirrored, Ordering::Relaxed);
                    shared.fetch_add(plan.shared, Ordering::Relaxed);
                    let copies = request.copies(&plan);
                    for &(block, content) in &copies {
                        host[block].store(content, Ordering::Relaxed);
                    }
                    // Nobody else may have written them before the store ends.
                    for &(block, content) in &copies {
                        assert_eq!(host[block].load(Ordering::Relaxed), content);
                    }
                    table.complete_store(&request.id, event, random.below(20) > 0).unwrap();
                    calls += 1;
                }
                Some(("Ready", tokens)) => {
                    assert_eq!(tokens, request.num_tokens);
                    if random.below(8) == 0 {
                        // Fails if somebody has released it.
                        let _ = table.settle(&request.id, tokens);
                        calls += 1;
                        continue;
                    }
                    let plan = table.begin_load(&request.id, 0, tokens, &request.device());
                    calls += 1;
                    let plan = match plan {
                        Ok(plan) => plan,
                        Err(TableError::UnknownRequest { .. }) => continue,
                        Err(error) => panic!("{error}"),
                    };
                    for (block, content) in request.copies(&plan) {
                        assert_eq!(host[block].load(Ordering::Relaxed), content);
                    }
                    table.finish_load(&request.id, random.below(20) > 0).unwrap();
                    loads.fetch_add(1, Ordering::Relaxed);
                    calls += 1;
                }
                other => panic!("{other:?}"),
            }
            match random.below(2000) {
                0 => table.release_all().unwrap(),
                1..100 => {
                    table.release(&id(random.below(THREADS as u32 * REQUESTS))).unwrap();
                    calls += 1;
                }
                _ => {}
            }
        }
        calls
    });

    println!("{loads:?} loads, {from_mirror:?} blocks from mirrors, {shared:?} shared");
    assert!(operations >= 1_000_000);
    assert!([loads, from_mirror, shared].iter().all(|n| n.load(Ordering::Relaxed) > 0));
    table.release_all().unwrap();
    assert_eq!(table.counts(), [0; 4]);
    assert_eq!((pool.num_free(), pool.num_evictable()), (CAPACITY as usize, 0));
}
