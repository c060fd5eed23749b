//! Every interleaving of a few calls, explored by loom:
//!
//! ```text
//! RUSTFLAGS="--cfg loom" cargo test --release --test loom
//! ```
//!
//! Each block has a cell for its content. Owners write it, finders read it, and loom
//! reports any two accesses that nothing orders: so it finds blocks with two owners and
//! memory orderings that are too weak, in every model.
#![cfg(loom)]

use std::sync::Arc;

use loom::cell::UnsafeCell;
use loom::thread::{self, JoinHandle};
use preempt_offload::block_pool::{BlockId, BlockKey, BlockPool, PoolError};
use preempt_offload::completion::{CompletionError, CompletionTracker, Progress};
use preempt_offload::request_table::{CopyPlan, Group, RequestTable, TableError};

/// Explores `f` with up to four preemptions, or `LOOM_MAX_PREEMPTIONS`.
fn model(f: impl Fn() + Send + Sync + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = builder.preemption_bound.or(Some(4));
    builder.check(f);
}

fn key(n: u32) -> BlockKey {
    BlockKey::new(&n.to_le_bytes(), 0).unwrap()
}

/// A pool and what is in its blocks.
struct Host {
    pool: Arc<BlockPool>,
    contents: Vec<UnsafeCell<u32>>,
}

// SAFETY: loom checks every access to the cells.
unsafe impl Sync for Host {}
// SAFETY: the cells hold plain numbers.
unsafe impl Send for Host {}

impl Host {
    fn new(capacity: u32, indexed: bool) -> Arc<Self> {
        let contents = (0..capacity).map(|_| UnsafeCell::new(0)).collect();
        Arc::new(Self { pool: Arc::new(BlockPool::new(capacity, indexed)), contents })
    }

    /// One block for each of `contents`, evictable and found by that number.
    fn with_evictable(contents: &[u32]) -> Arc<Self> {
        let host = Self::new(contents.len() as u32, true);
        for &content in contents {
            let ids = host.claim(1, content).unwrap();
            assert_eq!(host.pool.index(ids[0], &key(content)), Ok(true));
            host.pool.release(&ids).unwrap();
        }
        host
    }

    fn write(&self, id: BlockId, content: u32) {
        // SAFETY: loom fails the test if the access is not exclusive.
        self.contents[id as usize - 1].with_mut(|cell| unsafe { *cell = content });
    }

    fn read(&self, id: BlockId) -> u32 {
        // SAFETY: loom fails the test if the access overlaps with a write.
        self.contents[id as usize - 1].with(|cell| unsafe { *cell })
    }

    /// Claims blocks and fills them.
    fn claim(&self, n: usize, content: u32) -> Result<Vec<BlockId>, PoolError> {
        let ids = self.pool.claim(n)?;
        assert_eq!(ids.len(), n);
        ids.iter().for_each(|&id| self.write(id, content));
        Ok(ids)
    }

    /// Finds a block, which must have the content of its key.
    fn lookup(&self, content: u32) -> Vec<BlockId> {
        let found = self.pool.lookup(&key(content));
        found.inspect(|&id| assert_eq!(self.read(id), content)).into_iter().collect()
    }

    /// Every block is free, evictable or owned by exactly one of `owners`; once they have
    /// given their blocks back, all can be claimed.
    fn assert_conserved(&self, owners: &[&[BlockId]]) {
        let mut owned = owners.concat();
        owned.sort_unstable();
        assert!(owned.windows(2).all(|pair| pair[0] < pair[1]), "two owners: {owners:?}");
        assert!(owned.iter().all(|&id| self.pool.ref_count(id) == Ok(1)));
        let (free, evictable) = (self.pool.num_free(), self.pool.num_evictable());
        assert_eq!([free, evictable, owned.len()].iter().sum::<usize>(), self.pool.capacity());
        assert!(free.max(evictable) <= self.pool.capacity(), "a count below zero");
        self.pool.release(&owned).unwrap();
        self.assert_unowned();
    }

    /// No block is owned.
    fn assert_unowned(&self) {
        let capacity = self.pool.capacity();
        assert_eq!(self.pool.num_available(), capacity);
        let mut all = self.claim(capacity, 0).unwrap();
        assert_eq!((self.pool.num_free(), self.pool.num_evictable()), (0, 0));
        all.sort_unstable();
        assert_eq!(all, (1..=capacity as BlockId).collect::<Vec<_>>());
    }
}

/// Runs `f` in a thread of its own.
fn spawn<T: 'static>(host: &Arc<Host>, f: impl Fn(&Host) -> T + 'static) -> JoinHandle<T> {
    let host = host.clone();
    thread::spawn(move || f(&host))
}

#[test]
fn claim_claim() {
    model(|| {
        let host = Host::new(3, false);
        let other = spawn(&host, |host| host.claim(2, 1));
        let here = host.claim(2, 2);
        let there = other.join().unwrap();
        assert!(here.is_ok() != there.is_ok(), "there is enough for one of them");
        host.assert_conserved(&[&here.unwrap_or_default(), &there.unwrap_or_default()]);
    });
}

#[test]
fn three_claims_of_one() {
    model(|| {
        let host = Host::new(2, false);
        let others = [1, 2].map(|n| spawn(&host, move |host| host.claim(1, n)));
        let here = host.claim(1, 3);
        let [a, b] = others.map(|other| other.join().unwrap());
        let claims = [here, a, b].map(Result::unwrap_or_default);
        assert_eq!(claims.concat().len(), 2);
        host.assert_conserved(&[&claims[0], &claims[1], &claims[2]]);
    });
}

#[test]
fn claim_release() {
    model(|| {
        let host = Host::new(2, false);
        let ids = host.claim(2, 1).unwrap();
        let other = spawn(&host, |host| host.claim(2, 2));
        host.pool.release(&ids).unwrap();
        let there = other.join().unwrap();
        if let Err(error) = &there {
            let PoolError::Exhausted { available, .. } = error else { panic!("{error}") };
            assert!(*available < 2);
        }
        host.assert_conserved(&[&there.unwrap_or_default()]);
    });
}

#[test]
fn claim_release_in_two_words_of_the_bitmap() {
    model(|| {
        let host = Host::new(65, false);
        let ids = host.claim(65, 1).unwrap();
        host.pool.release(&ids[64..]).unwrap();
        let releaser = spawn(&host, move |host| {
            host.pool.release(&ids[..1]).unwrap();
            host.claim(1, 2).unwrap_or_default()
        });
        let here = host.claim(1, 3).unwrap();
        let there = releaser.join().unwrap();
        assert_eq!(there.len(), 1);
        host.pool.release(&(2..=64).collect::<Vec<_>>()).unwrap();
        host.assert_conserved(&[&here, &there]);
    });
}

#[test]
fn retain_release() {
    model(|| {
        let host = Host::new(1, false);
        let ids = host.claim(1, 1).unwrap();
        host.pool.retain(&ids).unwrap();
        let other = spawn(&host, |host| {
            host.pool.retain(&[1]).unwrap();
            assert_eq!(host.read(1), 1);
            host.pool.release(&[1, 1]).unwrap();
        });
        host.pool.release(&ids).unwrap();
        // The block may be free by now.
        let again = host.claim(1, 2).unwrap_or_default();
        other.join().unwrap();
        host.assert_conserved(&[&again]);
    });
}

#[test]
fn release_release_of_a_shared_block() {
    model(|| {
        let host = Host::new(1, false);
        let ids = host.claim(1, 1).unwrap();
        host.pool.retain(&ids).unwrap();
        let other = spawn(&host, |host| {
            assert_eq!(host.read(1), 1);
            host.pool.release(&[1]).unwrap();
        });
        let third = spawn(&host, |host| host.claim(1, 2).unwrap_or_default());
        assert_eq!(host.read(1), 1);
        host.pool.release(&ids).unwrap();
        other.join().unwrap();
        host.assert_conserved(&[&third.join().unwrap()]);
    });
}

#[test]
fn release_release_of_one_reference() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 1).unwrap();
        host.pool.index(1, &key(1)).unwrap();
        let other = spawn(&host, |host| host.pool.release(&[1]));
        let here = host.pool.release(&ids);
        let there = other.join().unwrap();
        assert!(here.is_ok() != there.is_ok());
        let error = PoolError::OverRelease { id: 1, capacity: 1 };
        assert_eq!(here.and(there), Err(error));
        host.assert_unowned();
    });
}

#[test]
fn index_lookup() {
    model(|| {
        let host = Host::new(2, true);
        let other = spawn(&host, |host| {
            let ids = host.claim(1, 1).unwrap();
            assert_eq!(host.pool.index(ids[0], &key(1)), Ok(true));
            host.pool.release(&ids).unwrap();
        });
        let found = host.lookup(1);
        other.join().unwrap();
        host.assert_conserved(&[&found]);
    });
}

#[test]
fn index_release() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 1).unwrap();
        host.pool.retain(&ids).unwrap();
        let other = spawn(&host, |host| host.pool.release(&[1]).unwrap());
        assert_eq!(host.pool.index(1, &key(1)), Ok(true));
        host.pool.release(&ids).unwrap();
        other.join().unwrap();
        assert_eq!((host.pool.num_free(), host.pool.num_evictable()), (0, 1));
        assert_eq!(host.lookup(1), [1]);
        host.assert_conserved(&[&[1]]);
    });
}

#[test]
fn index_release_of_the_only_reference() {
    model(|| {
        let host = Host::new(1, true);
        host.claim(1, 1).unwrap();
        let other = spawn(&host, |host| host.pool.release(&[1]).unwrap());
        // A caller should hold a reference, but one that does not harms nobody.
        let indexed = host.pool.index(1, &key(1));
        assert!(matches!(indexed, Ok(true) | Err(PoolError::Free { .. })));
        other.join().unwrap();
        let found = host.lookup(1);
        assert_eq!(found.len(), host.pool.ref_count(1).unwrap() as usize);
        host.assert_conserved(&[&found]);
    });
}

#[test]
fn index_index_of_one_block() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 7).unwrap();
        host.pool.retain(&ids).unwrap();
        let other = spawn(&host, |host| {
            let indexed = host.pool.index(1, &key(7)).unwrap();
            host.pool.release(&[1]).unwrap();
            indexed
        });
        let here = host.pool.index(1, &key(7)).unwrap();
        assert!(here != other.join().unwrap());
        assert_eq!(host.lookup(7), [1]);
        host.pool.release(&[1]).unwrap();
        host.assert_conserved(&[&[1]]);
    });
}

#[test]
fn index_index_of_one_key() {
    model(|| {
        let host = Host::new(2, true);
        host.claim(2, 7).unwrap();
        let other = spawn(&host, |host| host.pool.index(1, &key(7)).unwrap());
        let here = host.pool.index(2, &key(7)).unwrap();
        let there = other.join().unwrap();
        assert!(here || there);
        let found = host.lookup(7);
        assert_eq!(found.len(), 1);
        host.pool.release(&found).unwrap();
        host.assert_conserved(&[&[1], &[2]]);
    });
}

#[test]
fn lookup_release() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 1).unwrap();
        host.pool.index(1, &key(1)).unwrap();
        let other = spawn(&host, |host| {
            let found = host.lookup(1);
            assert!(host.pool.num_evictable() <= 1);
            found
        });
        host.pool.release(&ids).unwrap();
        // Not found only if it was about to become evictable.
        host.assert_conserved(&[&other.join().unwrap()]);
    });
}

#[test]
fn lookup_lookup() {
    model(|| {
        let host = Host::with_evictable(&[1]);
        let other = spawn(&host, |host| host.lookup(1));
        let here = host.lookup(1);
        assert_eq!((here, other.join().unwrap()), (vec![1], vec![1]));
        assert_eq!((host.pool.ref_count(1), host.pool.num_evictable()), (Ok(2), 0));
        host.pool.release(&[1]).unwrap();
        host.assert_conserved(&[&[1]]);
    });
}

#[test]
fn lookup_evict() {
    model(|| {
        let host = Host::with_evictable(&[1, 2]);
        let other = spawn(&host, |host| host.lookup(1));
        assert_eq!(host.pool.evict(1), 1, "one is evictable in any case");
        let found = other.join().unwrap();
        assert_eq!(host.pool.num_free(), 1);
        host.assert_conserved(&[&found]);
    });
}

#[test]
fn evict_evict() {
    model(|| {
        let host = Host::with_evictable(&[1, 2]);
        let other = spawn(&host, |host| host.pool.evict(2));
        let here = host.pool.evict(2);
        assert_eq!(here + other.join().unwrap(), 2);
        assert_eq!((host.pool.num_free(), host.pool.num_evictable()), (2, 0));
        host.assert_unowned();
    });
}

#[test]
fn evict_release() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 1).unwrap();
        host.pool.index(1, &key(1)).unwrap();
        let other = spawn(&host, |host| {
            let evicted = host.pool.evict(1);
            assert!(host.pool.num_evictable() <= 1);
            evicted
        });
        host.pool.release(&ids).unwrap();
        let evicted = other.join().unwrap();
        assert_eq!((host.pool.num_free(), host.pool.num_evictable()), (evicted, 1 - evicted));
        host.assert_unowned();
    });
}

#[test]
fn clear_lookup() {
    model(|| {
        let host = Host::with_evictable(&[1]);
        let other = spawn(&host, |host| host.lookup(1));
        host.pool.clear_index();
        let found = host.lookup(1);
        assert_eq!(found, [], "found after the index was cleared");
        host.assert_conserved(&[&other.join().unwrap()]);
    });
}

#[test]
fn clear_release() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 1).unwrap();
        host.pool.index(1, &key(1)).unwrap();
        let other = spawn(&host, |host| host.pool.clear_index());
        host.pool.release(&ids).unwrap();
        other.join().unwrap();
        assert_eq!(host.lookup(1), []);
        host.assert_unowned();
    });
}

#[test]
fn clear_index_of_old_content() {
    model(|| {
        let host = Host::new(2, true);
        let generation = host.pool.generation();
        let ids = host.claim(1, 1).unwrap();
        let other = spawn(&host, move |host| {
            host.pool.index_since(generation, 1, &key(1)).unwrap();
            host.pool.release(&[1]).unwrap();
        });
        host.pool.clear_index();
        assert_eq!(host.lookup(1), []);
        // New content under the same key is found, and only that.
        let new = host.pool.claim(1).unwrap();
        if new != ids {
            host.write(new[0], 1);
            host.pool.index(new[0], &key(1)).unwrap();
            let found = host.lookup(1);
            assert!(found.is_empty() || found == new);
            host.pool.release(&found).unwrap();
        }
        other.join().unwrap();
        host.assert_conserved(&[&new]);
    });
}

#[test]
fn claim_that_evicts_lookup() {
    model(|| {
        let host = Host::with_evictable(&[1]);
        let other = spawn(&host, |host| host.lookup(1));
        let claimed = host.claim(1, 2).unwrap_or_default();
        let found = other.join().unwrap();
        assert_eq!(claimed.len() + found.len(), 1, "one of them has the block");
        host.assert_conserved(&[&claimed, &found]);
    });
}

#[test]
fn claim_that_evicts_lookup_and_release() {
    model(|| {
        let host = Host::with_evictable(&[1]);
        let other = spawn(&host, |host| host.pool.release(&host.lookup(1)).unwrap());
        let claimed = host.claim(1, 2).unwrap_or_default();
        other.join().unwrap();
        host.assert_conserved(&[&claimed]);
    });
}

#[test]
fn claim_that_evicts_release() {
    model(|| {
        let host = Host::new(1, true);
        let ids = host.claim(1, 1).unwrap();
        host.pool.index(1, &key(1)).unwrap();
        let other = spawn(&host, |host| host.claim(1, 2).unwrap_or_default());
        assert_eq!(host.read(1), 1);
        host.pool.release(&ids).unwrap();
        host.assert_conserved(&[&other.join().unwrap()]);
    });
}

#[test]
fn claim_that_evicts_and_indexes_lookup() {
    model(|| {
        // The finder may hold the place of key 1 when the block has become that of key 2.
        let host = Host::with_evictable(&[1]);
        let other = spawn(&host, |host| host.lookup(1));
        let claimed = host.claim(1, 2).unwrap_or_default();
        for &id in &claimed {
            host.pool.index(id, &key(2)).unwrap();
        }
        let found = other.join().unwrap();
        assert!(claimed.is_empty() || found.is_empty());
        host.assert_conserved(&[&claimed, &found]);
    });
}

#[test]
fn claim_that_evicts_claim_that_evicts() {
    model(|| {
        let host = Host::with_evictable(&[1, 2]);
        let other = spawn(&host, |host| host.claim(1, 3).unwrap_or_default());
        let here = host.claim(1, 4).unwrap_or_default();
        let there = other.join().unwrap();
        assert_eq!(here.len() + there.len(), 2, "there is enough for both");
        host.assert_conserved(&[&here, &there]);
    });
}

/// A table of one group with 16 tokens per block.
fn table(host: &Host) -> Arc<RequestTable> {
    Arc::new(RequestTable::new(host.pool.clone(), vec![Group::attention(16)]))
}

/// Stores `n` full blocks of a request under event 0, with `keys` for the first of them.
fn store(table: &RequestTable, id: &str, n: u32, keys: &[u32]) -> Result<CopyPlan, TableError> {
    let keys = keys.iter().map(|&n| key(n)).collect();
    table.begin_store(id, 0, u64::from(n) * 16, &[(1..=n).collect()], &[keys])
}

fn ready(table: &RequestTable, id: &str, n: u32) {
    store(table, id, n, &[]).unwrap();
    assert_eq!(table.complete_store(id, 0, true), Ok(true));
}

#[test]
fn table_release_complete_store() {
    model(|| {
        let host = Host::new(2, true);
        let table = table(&host);
        store(&table, "a", 1, &[1]).unwrap();
        host.write(1, 1);
        let other = {
            let table = table.clone();
            thread::spawn(move || table.complete_store("a", 0, true).unwrap())
        };
        // Meanwhile the block may be claimed, but not while it is found by its key.
        assert_eq!(table.release("a"), Ok(true));
        let found = host.lookup(1);
        let claimed = host.claim(2 - found.len(), 2).unwrap_or_default();
        other.join().unwrap();
        assert_eq!((table.status("a"), table.counts()), (None, [0; 4]));
        host.assert_conserved(&[&found, &claimed]);
    });
}

#[test]
fn table_release_release() {
    model(|| {
        let host = Host::new(1, false);
        let table = table(&host);
        ready(&table, "a", 1);
        let other = {
            let table = table.clone();
            thread::spawn(move || table.release("a").unwrap())
        };
        let here = table.release("a").unwrap();
        assert!(here != other.join().unwrap());
        host.assert_unowned();
    });
}

#[test]
fn table_release_finish_load() {
    model(|| {
        let host = Host::new(2, false);
        let table = table(&host);
        ready(&table, "a", 2);
        table.begin_load("a", 0, 31, &[vec![1, 2]]).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || table.finish_load("a", true).unwrap())
        };
        assert_eq!(table.release("a"), Ok(true));
        other.join().unwrap();
        assert_eq!((table.status("a"), table.counts()), (None, [0; 4]));
        host.assert_unowned();
    });
}

#[test]
fn table_release_begin_load() {
    model(|| {
        let host = Host::new(1, false);
        let table = table(&host);
        ready(&table, "a", 1);
        let other = {
            let table = table.clone();
            thread::spawn(move || table.begin_load("a", 0, 16, &[vec![1]]))
        };
        assert_eq!(table.release("a"), Ok(true));
        // Either the load was first and keeps the block until it ends, or there is none.
        match other.join().unwrap() {
            Ok(plan) => {
                assert_eq!((plan.pairs.len(), host.pool.num_free()), (1, 0));
                table.finish_load("a", true).unwrap();
            }
            Err(error) => assert_eq!(error, TableError::UnknownRequest { id: "a".into() }),
        }
        assert_eq!(table.counts(), [0; 4]);
        host.assert_unowned();
    });
}

#[test]
fn table_begin_store_of_a_mirror_evict_that_mirror() {
    model(|| {
        let host = Host::new(2, false);
        let table = table(&host);
        ready(&table, "a", 1);
        table.settle("a", 16).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || store(&table, "b", 2, &[]))
        };
        let here = store(&table, "a", 2, &[]);
        let there = other.join().unwrap();
        // There is room for one of them, or for none where they met.
        assert!(here.is_err() || there.is_err());
        if let Ok(plan) = here {
            assert_eq!(plan.mirrored + plan.pairs.len(), 2);
        }
        table.release_all().unwrap();
        for id in ["a", "b"] {
            let _ = table.complete_store(id, 0, true);
        }
        assert_eq!(table.counts(), [0; 4]);
        host.assert_unowned();
    });
}

#[test]
fn table_begin_store_of_a_mirror_release() {
    model(|| {
        let host = Host::new(3, false);
        let table = table(&host);
        ready(&table, "a", 1);
        table.settle("a", 16).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || table.release("a").unwrap())
        };
        // One block may be on its way back from the mirror; two are free.
        let plan = store(&table, "a", 2, &[]).unwrap();
        assert!(other.join().unwrap());
        // Released before the store, which is a new request then, or doomed by it.
        assert_eq!(plan.mirrored + plan.pairs.len(), 2);
        let kept = table.complete_store("a", 0, true).unwrap();
        assert!(!kept || plan.mirrored == 0);
        table.release("a").unwrap();
        host.assert_unowned();
    });
}

#[test]
fn table_release_all_complete_store() {
    model(|| {
        let host = Host::new(1, true);
        let table = table(&host);
        store(&table, "a", 1, &[1]).unwrap();
        let other = {
            let table = table.clone();
            thread::spawn(move || table.complete_store("a", 0, true).unwrap())
        };
        table.release_all().unwrap();
        assert_eq!(host.lookup(1), [], "found although it is no longer valid");
        other.join().unwrap();
        assert_eq!(host.lookup(1), [], "found although it is no longer valid");
        assert_eq!(table.counts(), [0; 4]);
        host.assert_unowned();
    });
}

#[test]
fn table_begin_store_shares_release() {
    model(|| {
        let host = Host::new(2, true);
        let table = table(&host);
        store(&table, "a", 1, &[1]).unwrap();
        assert_eq!(table.complete_store("a", 0, true), Ok(true));
        let other = {
            let table = table.clone();
            thread::spawn(move || table.release("a").unwrap())
        };
        let plan = store(&table, "b", 1, &[1]).unwrap();
        assert!(other.join().unwrap());
        assert_eq!(plan.shared + plan.pairs.len(), 1);
        table.complete_store("b", 0, true).unwrap();
        table.release("b").unwrap();
        host.assert_unowned();
    });
}

#[test]
fn completion_report_report() {
    model(|| {
        let tracker = Arc::new(CompletionTracker::new(2));
        tracker.open(1).unwrap();
        let other = {
            let tracker = tracker.clone();
            thread::spawn(move || tracker.report(1, 1, false).unwrap())
        };
        let here = tracker.report(1, 0, true).unwrap();
        let there = other.join().unwrap();
        let (pending, failed) = (Progress::Pending, Progress::Failed);
        assert!([(pending, failed), (failed, pending)].contains(&(here, there)));
        assert_eq!(tracker.num_open(), 0);
    });
}

#[test]
fn completion_report_twice() {
    model(|| {
        let tracker = Arc::new(CompletionTracker::new(2));
        tracker.open(1).unwrap();
        let other = {
            let tracker = tracker.clone();
            thread::spawn(move || tracker.report(1, 0, true))
        };
        let here = tracker.report(1, 0, true);
        let there = other.join().unwrap();
        let twice = CompletionError::DuplicateReport { event: 1, rank: 0, world_size: 2 };
        assert!(here.is_ok() != there.is_ok());
        assert_eq!(here.and(there), Err(twice));
        assert_eq!(tracker.report(1, 1, true), Ok(Progress::Done));
    });
}

#[test]
fn completion_open_open() {
    model(|| {
        let tracker = Arc::new(CompletionTracker::new(1));
        let other = {
            let tracker = tracker.clone();
            thread::spawn(move || tracker.open(1))
        };
        let here = tracker.open(1);
        assert!(here.is_ok() != other.join().unwrap().is_ok());
        assert_eq!(tracker.num_open(), 1);
    });
}
