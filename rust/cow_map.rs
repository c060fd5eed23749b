//! A small lock-free map: a fixed number of buckets, each an immutable vector
//! that is replaced whole by compare and exchange.
//!
//! The values are immutable too. A state change puts a new value in the place of
//! the one it was computed from, and fails if another thread was faster, so every
//! change is decided by exactly one thread. The load is hundreds of keys, not
//! millions: a bucket holds a handful at most, and there is nothing to resize.

use std::borrow::Borrow;
use std::hash::{BuildHasher, Hash, RandomState};
use std::sync::Arc;

use crate::sync::SwapCell;

type Bucket<K, V> = SwapCell<Vec<(K, Arc<V>)>>;

pub(crate) struct CowMap<K, V> {
    buckets: Box<[Bucket<K, V>]>,
    hasher: RandomState,
}

impl<K: Clone + Eq + Hash, V> CowMap<K, V> {
    pub(crate) fn new(num_buckets: usize) -> Self {
        let empty = Arc::new(Vec::new());
        Self {
            buckets: (0..num_buckets).map(|_| SwapCell::new(empty.clone())).collect(),
            hasher: RandomState::new(),
        }
    }

    fn bucket<Q: Hash + ?Sized>(&self, key: &Q) -> &Bucket<K, V> {
        let hash = self.hasher.hash_one(key) as usize;
        &self.buckets[hash % self.buckets.len()]
    }

    pub(crate) fn get<Q>(&self, key: &Q) -> Option<Arc<V>>
    where
        K: Borrow<Q>,
        Q: Eq + Hash + ?Sized,
    {
        let bucket = self.bucket(key).load();
        bucket.iter().find(|(k, _)| k.borrow() == key).map(|(_, v)| v.clone())
    }

    /// Puts `next` (`None`: nothing) in the place of `current` (`None`: nothing).
    ///
    /// Returns `false`, with the map as it was, if `key` no longer has the very
    /// value `current`.
    pub(crate) fn compare_exchange(
        &self,
        key: &K,
        current: Option<&Arc<V>>,
        next: Option<Arc<V>>,
    ) -> bool {
        let cell = self.bucket(key);
        loop {
            let bucket = cell.load();
            let place = bucket.iter().position(|(k, _)| k == key);
            let unchanged = match (place, current) {
                (None, None) => true,
                (Some(i), Some(current)) => Arc::ptr_eq(&bucket[i].1, current),
                _ => false,
            };
            if !unchanged {
                return false;
            }
            let mut changed = Vec::clone(&bucket);
            match (place, &next) {
                (Some(i), Some(next)) => changed[i].1 = next.clone(),
                (Some(i), None) => drop(changed.swap_remove(i)),
                (None, Some(next)) => changed.push((key.clone(), next.clone())),
                (None, None) => return true,
            }
            if cell.compare_exchange(&bucket, Arc::new(changed)) {
                return true;
            }
        }
    }

    /// The values, bucket by bucket, each bucket as it is when it is reached.
    pub(crate) fn values(&self) -> impl Iterator<Item = Arc<V>> + '_ {
        self.buckets.iter().flat_map(|cell| {
            let bucket = cell.load();
            bucket.iter().map(|(_, v)| v.clone()).collect::<Vec<_>>()
        })
    }
}
