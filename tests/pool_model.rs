//! Any sequence of calls, right or wrong, has the results that a naive model predicts.
#![cfg(not(loom))]

mod model;

use model::{Key, PoolModel, key};
use preempt_offload::block_pool::BlockPool;
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Op {
    Claim(usize),
    Retain(Vec<u32>),
    Release(Vec<u32>),
    Index(u32, Key),
    /// As if the content were older than so many calls of `clear_index`.
    IndexOld(u64, u32, Key),
    Lookup(Key),
    Evict(usize),
    ClearIndex,
}

fn ops(capacity: u32) -> impl Strategy<Value = Vec<Op>> {
    // One id in so many is foreign: the null block, or the first beyond the pool.
    let id = || 0..=capacity + 1;
    let ids = || prop::collection::vec(id(), 1..5);
    let key = || (0..12u8, 0..2u16);
    let op = prop_oneof![
        6 => (0..=capacity as usize / 2 + 1).prop_map(Op::Claim),
        1 => (0..=capacity as usize + 1).prop_map(Op::Claim),
        4 => ids().prop_map(Op::Retain),
        8 => ids().prop_map(Op::Release),
        8 => id().prop_map(|id| Op::Release(vec![id])),
        8 => (id(), key()).prop_map(|(id, key)| Op::Index(id, key)),
        1 => (0..2u64, id(), key()).prop_map(|(age, id, key)| Op::IndexOld(age, id, key)),
        8 => key().prop_map(Op::Lookup),
        1 => (0..=capacity as usize).prop_map(Op::Evict),
        1 => Just(Op::ClearIndex),
    ];
    prop::collection::vec(op, 1..120)
}

fn pools() -> impl Strategy<Value = (u32, bool, Vec<Op>)> {
    let capacity = prop_oneof![4 => 0..12u32, 1 => Just(64), 1 => Just(65), 1 => Just(130)];
    let indexed = prop::bool::weighted(0.8);
    (capacity, indexed)
        .prop_flat_map(|(capacity, indexed)| (Just(capacity), Just(indexed), ops(capacity)))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_pool_does_what_the_model_does((capacity, indexed, ops) in pools()) {
        let pool = BlockPool::new(capacity, indexed);
        let mut model = PoolModel::new(capacity, indexed);
        for op in ops {
            match op {
                Op::Claim(n) => prop_assert_eq!(pool.claim(n), model.claim(n)),
                Op::Retain(ids) => prop_assert_eq!(pool.retain(&ids), model.retain(&ids)),
                Op::Release(ids) => prop_assert_eq!(pool.release(&ids), model.release(&ids)),
                Op::Index(id, k) => {
                    let expected = model.index_since(model.generation(), id, k);
                    prop_assert_eq!(pool.index(id, &key(k)), expected);
                }
                Op::IndexOld(age, id, k) => {
                    let generation = model.generation().saturating_sub(age);
                    let expected = model.index_since(generation, id, k);
                    prop_assert_eq!(pool.index_since(generation, id, &key(k)), expected);
                }
                Op::Lookup(k) => prop_assert_eq!(pool.lookup(&key(k)), model.lookup(k)),
                Op::Evict(n) => prop_assert_eq!(pool.evict(n), model.evict(n)),
                Op::ClearIndex => {
                    pool.clear_index();
                    model.clear_index();
                }
            }
            model.assert_like(&pool);
        }
        let refs = |id| vec![id; pool.ref_count(id).unwrap() as usize];
        let left: Vec<_> = (1..=capacity).flat_map(refs).collect();
        prop_assert_eq!(pool.release(&left), Ok(()));
        prop_assert_eq!(pool.num_available(), pool.capacity());
        pool.clear_index();
        prop_assert_eq!(pool.num_free(), pool.capacity());
    }
}
