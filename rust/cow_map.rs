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

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_replaced_only_in_the_place_of_the_very_value_expected() {
        for buckets in [1, 16] {
            let map: CowMap<u32, &str> = CowMap::new(buckets);
            let [a, b] = ["a", "b"].map(Arc::new);
            assert!(map.compare_exchange(&1, None, Some(a.clone())));
            assert!(!map.compare_exchange(&1, None, Some(b.clone())), "there is one");
            assert!(!map.compare_exchange(&1, Some(&b), None), "another one");
            assert!(!map.compare_exchange(&1, Some(&Arc::new("a")), None), "an equal one");
            assert!(!map.compare_exchange(&2, Some(&a), None), "there is none");
            assert_eq!(map.get(&1), Some(a.clone()));
            assert!(map.compare_exchange(&1, Some(&a), Some(b.clone())));
            assert_eq!((map.get(&1), map.get(&2)), (Some(b.clone()), None));
            assert!(map.compare_exchange(&1, Some(&b), None));
            assert_eq!((map.get(&1), map.values().count()), (None, 0));
            assert!(map.compare_exchange(&1, None, None));
        }
    }

    #[test]
    fn keys_of_one_bucket_do_not_disturb_each_other() {
        let map: CowMap<Arc<str>, usize> = CowMap::new(2);
        let values: Vec<_> = (0..20).map(Arc::new).collect();
        let key = |i: usize| Arc::from(format!("key {i}"));
        for (i, value) in values.iter().enumerate() {
            assert!(map.compare_exchange(&key(i), None, Some(value.clone())));
        }
        for i in (0..20).step_by(2) {
            assert!(map.compare_exchange(&key(i), Some(&values[i]), None));
        }
        for i in 0..20 {
            assert_eq!(map.get(&*key(i)).as_deref(), (i % 2 == 1).then_some(&i));
        }
        let mut left: Vec<_> = map.values().map(|value| *value).collect();
        left.sort_unstable();
        assert_eq!(left, (1..20).step_by(2).collect::<Vec<_>>());
    }

    #[test]
    fn no_change_is_lost_between_threads() {
        let map: CowMap<u32, u32> = CowMap::new(2);
        for key in 0..4 {
            assert!(map.compare_exchange(&key, None, Some(Arc::new(0))));
        }
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for i in 0..2000 {
                        let key = i % 4;
                        loop {
                            let now = map.get(&key).unwrap();
                            let next = Some(Arc::new(*now + 1));
                            if map.compare_exchange(&key, Some(&now), next) {
                                break;
                            }
                        }
                    }
                });
            }
        });
        assert!(map.values().all(|count| *count == 2000));
    }
}
