//! Any sequence of transitions, right or wrong, has the results that a naive model predicts,
//! down to the host blocks.
#![cfg(not(loom))]

mod model;

use std::collections::BTreeMap;
use std::sync::Arc;

use model::{Key, PoolModel, key};
use preempt_offload::block_pool::{BlockId, BlockPool, PoolError};
use preempt_offload::request_table::{BlockPair, CopyPlan, Group, RequestTable, State, TableError};
use proptest::prelude::*;

/// Groups that keys and block tables are made for; a table may have fewer.
const GROUPS: usize = 3;

#[derive(Debug, Clone)]
struct Entry {
    state: State,
    doomed: bool,
    num_tokens: u64,
    /// Host blocks by group and position.
    hosts: BTreeMap<(usize, usize), BlockId>,
    keys: Vec<(BlockId, Key)>,
    generation: u64,
}

struct TableModel {
    pool: PoolModel,
    capacity: usize,
    groups: Vec<Group>,
    entries: BTreeMap<&'static str, Entry>,
    /// The mirrors, the longest unused first.
    mirrors: Vec<&'static str>,
}

impl TableModel {
    fn entry(&self, id: &'static str) -> Result<Entry, TableError> {
        self.entries.get(id).cloned().ok_or_else(|| TableError::UnknownRequest { id: id.into() })
    }

    fn wrong_state(id: &str, entry: &Entry, wanted: &'static str) -> TableError {
        let found = if entry.doomed { "released" } else { entry.state.name() };
        TableError::WrongState { id: id.into(), found, wanted }
    }

    fn check_groups(&self, tables: &[Vec<u32>]) -> Result<(), TableError> {
        let (expected, found) = (self.groups.len(), tables.len());
        if expected == found { Ok(()) } else { Err(TableError::GroupCount { expected, found }) }
    }

    /// Forgets an entry and gives its blocks back.
    fn forget(&mut self, id: &'static str) {
        let entry = self.entries.remove(id).unwrap();
        self.mirrors.retain(|&mirror| mirror != id);
        let blocks: Vec<_> = entry.hosts.into_values().collect();
        self.pool.release(&blocks).unwrap();
    }

    fn claim(&mut self, n: usize, id: &'static str) -> Result<Vec<BlockId>, TableError> {
        let others: Vec<_> = self.mirrors.iter().copied().filter(|&other| other != id).collect();
        if self.pool.num_available() < n {
            // What would there be without the mirrors?
            let mut without = self.pool.clone();
            for other in &others {
                let blocks: Vec<_> = self.entries[other].hosts.values().copied().collect();
                without.release(&blocks).unwrap();
            }
            let available = without.num_available();
            if available < n {
                let capacity = self.capacity;
                return Err(TableError::Capacity { needed: n, available, capacity });
            }
            for other in others {
                if self.pool.num_available() < n {
                    self.forget(other);
                }
            }
        }
        Ok(self.pool.claim(n).unwrap())
    }

    fn begin_store(
        &mut self,
        id: &'static str,
        event: u64,
        num_tokens: u64,
        device: &[Vec<u32>],
        keys: &[Vec<Key>],
    ) -> Result<CopyPlan, TableError> {
        self.check_groups(device)?;
        let mut mirror = BTreeMap::new();
        if let Some(entry) = self.entries.get(id) {
            if entry.doomed || entry.state != State::Mirrored {
                return Err(Self::wrong_state(id, entry, "Mirrored"));
            }
            mirror = entry.hosts.clone();
        }
        // Where the request has blocks on the device, seen from the end of the tokens.
        let mut wanted = BTreeMap::new();
        for (group, blocks) in device.iter().enumerate() {
            let Group { block_tokens, state } = self.groups[group];
            let positions = num_tokens.div_ceil(block_tokens) as usize;
            let first = positions.saturating_sub(blocks.len());
            for position in first..positions {
                let newest = position + 1 == positions;
                if blocks[position - first] != 0 && (newest || !state) {
                    wanted.insert((group, position), blocks[position - first]);
                }
            }
            if state && positions > 0 && !wanted.contains_key(&(group, positions - 1)) {
                return Err(TableError::NoStateBlock { group, num_tokens });
            }
        }
        let (mut hosts, unused): (BTreeMap<_, _>, BTreeMap<_, _>) =
            mirror.into_iter().partition(|(place, _)| wanted.contains_key(place));
        self.pool.release(&unused.into_values().collect::<Vec<_>>()).unwrap();
        if let Some(entry) = self.entries.get_mut(id) {
            entry.hosts = hosts.clone();
        }
        let mirrored = hosts.len();
        let key_of = |(group, position): (usize, usize)| keys.get(group)?.get(position).copied();
        let mut shared = Vec::new();
        let mut missing = Vec::new();
        for (place, device) in wanted {
            if hosts.contains_key(&place) {
                continue;
            }
            if let Some(host) = key_of(place).and_then(|key| self.pool.lookup(key)) {
                hosts.insert(place, host);
                shared.push(host);
            } else {
                missing.push((place.0, device, place));
            }
        }
        let claimed = match self.claim(missing.len(), id) {
            Ok(claimed) => claimed,
            Err(error) => {
                self.pool.release(&shared).unwrap();
                return Err(error);
            }
        };
        missing.sort_unstable();
        let mut pairs = Vec::new();
        let mut stored_keys = Vec::new();
        for (&(group, device, place), &host) in missing.iter().zip(&claimed) {
            hosts.insert(place, host);
            pairs.push(BlockPair { group: group as u32, device, host });
            stored_keys.extend(key_of(place).map(|key| (host, key)));
        }
        let entry = Entry {
            state: State::Storing { event },
            doomed: false,
            num_tokens,
            hosts,
            keys: stored_keys,
            generation: self.pool.generation(),
        };
        self.entries.insert(id, entry);
        self.mirrors.retain(|&mirror| mirror != id);
        Ok(CopyPlan { pairs, mirrored, shared: shared.len() })
    }

    fn complete_store(
        &mut self,
        id: &'static str,
        event: u64,
        ok: bool,
    ) -> Result<bool, TableError> {
        let entry = self.entry(id)?;
        if entry.state != (State::Storing { event }) {
            return Err(Self::wrong_state(id, &entry, "Storing under this event"));
        }
        if ok {
            for &(host, key) in &entry.keys {
                self.pool.index_since(entry.generation, host, key).unwrap();
            }
        }
        if ok && !entry.doomed {
            self.entries.get_mut(id).unwrap().state = State::Ready;
        } else {
            self.forget(id);
        }
        Ok(ok && !entry.doomed)
    }

    fn begin_load(
        &mut self,
        id: &'static str,
        from_tokens: u64,
        num_tokens: u64,
        device: &[Vec<u32>],
    ) -> Result<CopyPlan, TableError> {
        self.check_groups(device)?;
        let entry = self.entry(id)?;
        if entry.state != State::Ready {
            return Err(Self::wrong_state(id, &entry, "Ready"));
        }
        if num_tokens > entry.num_tokens {
            let (wanted, stored) = (num_tokens, entry.num_tokens);
            return Err(TableError::TooManyTokens { id: id.into(), wanted, stored });
        }
        let mut pairs = Vec::new();
        for (group, &Group { block_tokens, state }) in self.groups.iter().enumerate() {
            let needed = num_tokens.div_ceil(block_tokens) as usize;
            let found = device[group].len();
            if found < needed {
                return Err(TableError::ShortTable { group, needed, found });
            }
            let mut first = (from_tokens / block_tokens) as usize;
            if state && needed > 0 {
                first = needed - 1;
                if device[group][first] == 0 {
                    return Err(TableError::NoStateBlock { group, num_tokens });
                }
                if num_tokens != entry.num_tokens {
                    let (wanted, stored) = (num_tokens, entry.num_tokens);
                    return Err(TableError::OtherState { id: id.into(), wanted, stored });
                }
            }
            for position in first..needed {
                let device = device[group][position];
                match entry.hosts.get(&(group, position)) {
                    _ if device == 0 => {}
                    Some(&host) => pairs.push(BlockPair { group: group as u32, device, host }),
                    None => return Err(TableError::NotStored { id: id.into(), group, position }),
                }
            }
        }
        let entry = self.entries.get_mut(id).unwrap();
        entry.state = State::Loading;
        entry.num_tokens = num_tokens;
        Ok(CopyPlan { pairs, ..Default::default() })
    }

    fn mirror(
        &mut self,
        id: &'static str,
        from: State,
        ok: bool,
        num_tokens: u64,
    ) -> Result<(), TableError> {
        let entry = self.entry(id)?;
        if entry.state != from {
            return Err(Self::wrong_state(id, &entry, from.name()));
        }
        if entry.doomed || !ok {
            self.forget(id);
            return Ok(());
        }
        let num_tokens = num_tokens.min(entry.num_tokens);
        let (full, partial): (BTreeMap<_, _>, BTreeMap<_, _>) =
            entry.hosts.into_iter().partition(|((group, position), _)| {
                let Group { block_tokens, state } = self.groups[*group];
                !state && (*position as u64 + 1) * block_tokens <= num_tokens
            });
        let entry = self.entries.get_mut(id).unwrap();
        entry.state = State::Mirrored;
        entry.num_tokens = num_tokens;
        entry.hosts = full;
        self.mirrors.push(id);
        self.pool.release(&partial.into_values().collect::<Vec<_>>()).unwrap();
        Ok(())
    }

    fn release(&mut self, id: &'static str) -> bool {
        let Some(entry) = self.entries.get_mut(id) else { return false };
        let known = !entry.doomed;
        match entry.state {
            State::Storing { .. } | State::Loading => entry.doomed = true,
            State::Ready | State::Mirrored => self.forget(id),
        }
        known
    }

    fn release_all(&mut self) {
        self.pool.clear_index();
        for id in self.entries.keys().copied().collect::<Vec<_>>() {
            self.release(id);
        }
    }

    /// The right call for the state that a request is in.
    fn resolve(&self, id: &'static str, op: Op) -> Op {
        let Op::Turn { ok, settle, skip, cut } = op else { return op };
        let Some(entry) = self.entries.get(id) else { return Op::Release };
        match entry.state {
            State::Storing { event } => Op::CompleteStore { event, ok },
            State::Ready if settle => {
                Op::Settle { num_tokens: (entry.num_tokens + 1).saturating_sub(cut) }
            }
            State::Ready => {
                let num_tokens = entry.num_tokens.saturating_sub(cut);
                let table = |(group, &Group { block_tokens, .. }): (usize, &Group)| {
                    let block =
                        |i| u32::from(entry.hosts.contains_key(&(group, i))) * (90 - i as u32);
                    (0..num_tokens.div_ceil(block_tokens) as usize).map(block).collect()
                };
                let device = self.groups.iter().enumerate().map(table).collect();
                Op::BeginLoad { from_tokens: skip, num_tokens, device }
            }
            State::Loading => Op::FinishLoad { ok },
            State::Mirrored => Op::HoldByOthers,
        }
    }

    fn counts(&self) -> [usize; 4] {
        ["Storing", "Ready", "Loading", "Mirrored"]
            .map(|name| self.entries.values().filter(|e| e.state.name() == name).count())
    }
}

const IDS: [&str; 4] = ["a", "b", "c", "d"];

#[derive(Debug, Clone)]
enum Op {
    BeginStore {
        event: u64,
        num_tokens: u64,
        device: Vec<Vec<u32>>,
        keys: Vec<Vec<Key>>,
    },
    CompleteStore {
        event: u64,
        ok: bool,
    },
    BeginLoad {
        from_tokens: u64,
        num_tokens: u64,
        device: Vec<Vec<u32>>,
    },
    FinishLoad {
        ok: bool,
    },
    Settle {
        num_tokens: u64,
    },
    Release,
    /// Whatever comes next for the request, if it is preserved.
    Turn {
        ok: bool,
        settle: bool,
        skip: u64,
        cut: u64,
    },
    ReleaseAll,
    /// Others take blocks, or hold one of the request's too, and give all back later.
    ClaimByOthers(usize),
    HoldByOthers,
    ReleaseByOthers,
}

/// Block tables for `groups` groups; within a group every block is another one.
fn device(
    groups: usize,
    lengths: impl Strategy<Value = usize>,
) -> impl Strategy<Value = Vec<Vec<u32>>> {
    // A step of 1 makes neighbours. Some blocks left a sliding window, and block 0 is null.
    let table = (
        lengths,
        0..41u32,
        prop_oneof![Just(1), 1..41u32],
        prop_oneof![2 => Just(0), 1 => 0..5usize],
    );
    let table = table.prop_map(|(length, start, step, absent)| {
        let block = |i| if i < absent { 0 } else { (start + i as u32 * step) % 41 };
        (0..length).map(block).collect()
    });
    // Once in a while for one group too many.
    let count = prop::bool::weighted(0.98).prop_map(move |right| groups + usize::from(!right));
    (prop::collection::vec(table, groups + 1), count).prop_map(|(mut tables, count)| {
        tables.truncate(count);
        tables
    })
}

fn keys() -> impl Strategy<Value = Vec<Vec<Key>>> {
    // Requests begin with the same tokens or not, so they have the same keys or not.
    let group = (0..2u8, 0..8usize);
    prop::collection::vec(group, 0..=GROUPS).prop_map(|groups| {
        let keys = |(group, (family, len)): (usize, (u8, usize))| {
            (0..len).map(|i| (family * 16 + i as u8, group as u16)).collect()
        };
        groups.into_iter().enumerate().map(keys).collect()
    })
}

fn ops(groups: usize) -> impl Strategy<Value = Vec<(&'static str, Op)>> {
    let lengths = prop_oneof![1 => 0..8usize, 2 => 20..30usize];
    let begin_store = (0..2u64, 0..24u64, device(groups, lengths), keys()).prop_map(
        |(event, num_tokens, device, keys)| Op::BeginStore { event, num_tokens, device, keys },
    );
    let begin_load = (0..12u64, 0..24u64, device(groups, 5..30usize)).prop_map(
        |(from_tokens, num_tokens, device)| Op::BeginLoad { from_tokens, num_tokens, device },
    );
    let mostly = || prop::bool::weighted(0.85);
    let rarely = || prop::bool::weighted(0.2);
    let turn = (mostly(), rarely(), 0..3u64, 0..3u64)
        .prop_map(|(ok, settle, skip, cut)| Op::Turn { ok, settle, skip, cut });
    let op = prop_oneof![
        12 => begin_store,
        32 => turn,
        2 => (0..2u64, mostly()).prop_map(|(event, ok)| Op::CompleteStore { event, ok }),
        2 => begin_load,
        1 => mostly().prop_map(|ok| Op::FinishLoad { ok }),
        1 => (0..24u64).prop_map(|num_tokens| Op::Settle { num_tokens }),
        1 => rarely().prop_map(|all| if all { Op::ReleaseAll } else { Op::Release }),
        1 => (0..8usize).prop_map(Op::ClaimByOthers),
        1 => Just(Op::HoldByOthers),
        2 => Just(Op::ReleaseByOthers),
    ];
    prop::collection::vec((prop::sample::select(&IDS[..]), op), 1..100)
}

#[derive(Debug, Clone)]
struct Setup {
    capacity: u32,
    indexed: bool,
    groups: Vec<Group>,
    ops: Vec<(&'static str, Op)>,
}

fn setups() -> impl Strategy<Value = Setup> {
    let group = (1..7u64, prop::bool::weighted(0.3))
        .prop_map(|(block_tokens, state)| Group { block_tokens, state });
    let groups = prop::collection::vec(group, 1..=GROUPS);
    (prop_oneof![1 => 0..8u32, 4 => 8..40u32], prop::bool::weighted(0.8), groups).prop_flat_map(
        |(capacity, indexed, groups)| {
            ops(groups.len()).prop_map(move |ops| Setup {
                capacity,
                indexed,
                groups: groups.clone(),
                ops,
            })
        },
    )
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..Default::default() })]

    #[test]
    fn the_table_does_what_the_model_does(setup in setups()) {
        let Setup { capacity, indexed, groups, ops } = setup;
        let pool = Arc::new(BlockPool::new(capacity, indexed));
        let table = RequestTable::new(pool.clone(), groups.clone());
        let mut model = TableModel {
            pool: PoolModel::new(capacity, indexed),
            capacity: capacity as usize,
            groups,
            entries: BTreeMap::new(),
            mirrors: Vec::new(),
        };
        let mut others: Vec<BlockId> = Vec::new();
        for (id, op) in ops {
            match model.resolve(id, op) {
                Op::Turn { .. } => unreachable!("resolved above"),
                Op::BeginStore { event, num_tokens, device, keys } => {
                    let expected = model.begin_store(id, event, num_tokens, &device, &keys);
                    let keys: Vec<Vec<_>> =
                        keys.into_iter().map(|of| of.into_iter().map(key).collect()).collect();
                    let plan = table.begin_store(id, event, num_tokens, &device, &keys);
                    prop_assert_eq!(plan, expected);
                }
                Op::CompleteStore { event, ok } => {
                    let expected = model.complete_store(id, event, ok);
                    prop_assert_eq!(table.complete_store(id, event, ok), expected);
                }
                Op::BeginLoad { from_tokens, num_tokens, device } => {
                    let expected = model.begin_load(id, from_tokens, num_tokens, &device);
                    prop_assert_eq!(table.begin_load(id, from_tokens, num_tokens, &device), expected);
                }
                Op::FinishLoad { ok } => {
                    let expected = model.mirror(id, State::Loading, ok, u64::MAX);
                    prop_assert_eq!(table.finish_load(id, ok), expected);
                }
                Op::Settle { num_tokens } => {
                    let expected = model.mirror(id, State::Ready, true, num_tokens);
                    prop_assert_eq!(table.settle(id, num_tokens), expected);
                }
                Op::Release => prop_assert_eq!(table.release(id), Ok(model.release(id))),
                Op::ReleaseAll => {
                    prop_assert_eq!(table.release_all(), Ok(()));
                    model.release_all();
                }
                Op::ClaimByOthers(n) => {
                    let claimed: Result<_, PoolError> = pool.claim(n);
                    prop_assert_eq!(&claimed, &model.pool.claim(n));
                    others.extend(claimed.into_iter().flatten());
                }
                Op::HoldByOthers => {
                    let held = model.entries.get(id).and_then(|e| e.hosts.values().next());
                    let held: Vec<_> = held.copied().into_iter().collect();
                    prop_assert_eq!(pool.retain(&held), model.pool.retain(&held));
                    others.extend(held);
                }
                Op::ReleaseByOthers => {
                    prop_assert_eq!(pool.release(&others), Ok(()));
                    model.pool.release(&others).unwrap();
                    others.clear();
                }
            }
            for id in IDS {
                let entry = model.entries.get(id).filter(|entry| !entry.doomed);
                prop_assert_eq!(table.status(id), entry.map(|e| (e.state, e.num_tokens)));
            }
            prop_assert_eq!(table.counts(), model.counts());
            model.pool.assert_like(&pool);
        }
        // All requests end and all copies with them: then the pool is as new.
        pool.release(&others).unwrap();
        for (id, entry) in model.entries {
            table.release(id).unwrap();
            match entry.state {
                State::Storing { event } => drop(table.complete_store(id, event, true).unwrap()),
                State::Loading => table.finish_load(id, true).unwrap(),
                State::Ready | State::Mirrored => {}
            }
        }
        prop_assert_eq!(table.counts(), [0; 4]);
        prop_assert_eq!(pool.num_available(), pool.capacity());
        pool.clear_index();
        prop_assert_eq!(pool.num_free(), pool.capacity());
    }
}
