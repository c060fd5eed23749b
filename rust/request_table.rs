//! Preempted requests and where their KV is on the host: the state machine.
//!
//! ```text
//!            begin_store            complete_store           begin_load
//!   (none) ---------------> Storing ---------------> Ready ---------------> Loading
//!      ^                       |  failed               | settle               |
//!      |                       v                       v                      | finish_load
//!      +---- release ------ (gone) <--- evicted --- Mirrored <---------------+
//!                                                      |
//!                        Storing <------- begin_store -+   (only what is new is copied)
//! ```
//!
//! An entry maps every logical block of a request, per KV cache group, to a host block
//! (0: nothing there, as outside a sliding window). A *full* block of an attention
//! group never changes, so a request that runs again leaves its full blocks behind as
//! a mirror: a later preemption copies only the rest, and whoever needs the host
//! blocks more evicts the mirror unused for longest. A block of a *state* group is what a
//! recurrent layer has made of all tokens so far; only the newest is kept, and it can be
//! restored at exactly that number of tokens.
//!
//! Entries are immutable; a transition replaces one by compare and exchange. The
//! winner owns what the transition sets free. While a copy is under way (Storing,
//! Loading) an entry only gets *doomed*: its blocks go back when the copy has ended.

use std::sync::Arc;

use crate::block_pool::{BlockId, BlockKey, BlockPool, PoolError};
use crate::cow_map::CowMap;
use crate::sync::atomic::{AtomicU64, Ordering};

/// The longest block table of a request: beyond a hundred million tokens in any model.
pub const MAX_BLOCKS: u64 = 1 << 24;

/// Where the KV of a request stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Being copied to the host under this event; not restorable yet.
    Storing {
        /// The event of the completion tracker that ends the copy.
        event: u64,
    },
    /// Complete on the host.
    Ready,
    /// Being copied back to the device.
    Loading,
    /// The request runs again; its full blocks are on the host still, evictable.
    Mirrored,
}

impl State {
    /// The state's name, as in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            State::Storing { .. } => "Storing",
            State::Ready => "Ready",
            State::Loading => "Loading",
            State::Mirrored => "Mirrored",
        }
    }
}

/// One block to copy, in either direction. Ids count blocks; 0, the null block, is none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockPair {
    /// KV cache group.
    pub group: u32,
    /// Block on the device.
    pub device: u32,
    /// Block on the host.
    pub host: BlockId,
}

/// What a store or a load has to copy.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct CopyPlan {
    /// The blocks to copy.
    pub pairs: Vec<BlockPair>,
    /// Blocks that are on the host already, from the request's mirror.
    pub mirrored: usize,
    /// Blocks that are on the host already, stored by another request.
    pub shared: usize,
}

/// Why a transition was refused; every request is in the state it was in before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TableError {
    /// The host has too few blocks, even if every mirror gave way.
    #[error("{needed} host blocks needed, {available} of {capacity} available")]
    Capacity {
        /// Blocks the request needs.
        needed: usize,
        /// Free and evictable blocks, mirrors included.
        available: usize,
        /// Blocks on the host.
        capacity: usize,
    },
    /// The table has no such request.
    #[error("request {id:?} is not preserved")]
    UnknownRequest {
        /// The request's id.
        id: String,
    },
    /// The request is not in the state that the transition starts from.
    #[error("request {id:?} is {found}, not {wanted}")]
    WrongState {
        /// The request's id.
        id: String,
        /// The state it is in.
        found: &'static str,
        /// The state that was needed.
        wanted: &'static str,
    },
    /// As many block tables were given as there are not groups.
    #[error("{found} block tables given for {expected} KV cache groups")]
    GroupCount {
        /// KV cache groups.
        expected: usize,
        /// Block tables given.
        found: usize,
    },
    /// A device block table does not reach as far as the tokens to restore.
    #[error("group {group} has {found} device blocks for {needed} blocks to restore")]
    ShortTable {
        /// KV cache group.
        group: usize,
        /// Blocks needed.
        needed: usize,
        /// Blocks given.
        found: usize,
    },
    /// A block is wanted on the device that was not stored.
    #[error("block {position} of group {group} of request {id:?} is not on the host")]
    NotStored {
        /// The request's id.
        id: String,
        /// KV cache group.
        group: usize,
        /// Logical position of the block.
        position: usize,
    },
    /// A state group has no device block for the state after the tokens to store, or to
    /// restore.
    #[error("group {group} has no device block for the state after {num_tokens} tokens")]
    NoStateBlock {
        /// KV cache group.
        group: usize,
        /// Tokens behind the state.
        num_tokens: u64,
    },
    /// A state can be restored only at the tokens it was stored at.
    #[error("{wanted} tokens of request {id:?} wanted, but its state is that of {stored}")]
    OtherState {
        /// The request's id.
        id: String,
        /// Tokens asked for.
        wanted: u64,
        /// Tokens stored.
        stored: u64,
    },
    /// More tokens are to be restored than were stored.
    #[error("{wanted} tokens of request {id:?} wanted, {stored} are stored")]
    TooManyTokens {
        /// The request's id.
        id: String,
        /// Tokens asked for.
        wanted: u64,
        /// Tokens stored.
        stored: u64,
    },
    /// The request has more tokens than any engine has blocks for.
    #[error(
        "{num_tokens} tokens in blocks of {block_tokens}; a request has at most {MAX_BLOCKS} blocks"
    )]
    TooLong {
        /// Tokens to store.
        num_tokens: u64,
        /// Tokens per block.
        block_tokens: u64,
    },
    /// A host block was misused.
    #[error(transparent)]
    Pool(#[from] PoolError),
}

struct Entry {
    id: Arc<str>,
    state: State,
    /// The request is gone; the entry goes when its copy has ended.
    doomed: bool,
    /// Tokens whose KV is (or is about to be) on the host.
    num_tokens: u64,
    /// Host blocks by group and logical position; 0: none.
    tables: Arc<[Vec<BlockId>]>,
    /// Blocks that others may find once the store is complete.
    keys: Arc<[(BlockId, BlockKey)]>,
    /// The generation of the pool's index when the store was planned.
    generation: u64,
    /// When the entry became a mirror, by the table's clock.
    stamp: u64,
}

impl Entry {
    fn blocks(&self) -> Vec<BlockId> {
        self.tables.iter().flatten().copied().filter(|&id| id != 0).collect()
    }

    fn with(&self, state: State, doomed: bool) -> Self {
        Self {
            id: self.id.clone(),
            state,
            doomed,
            num_tokens: self.num_tokens,
            tables: self.tables.clone(),
            keys: self.keys.clone(),
            generation: self.generation,
            stamp: self.stamp,
        }
    }

    fn wrong_state(&self, wanted: &'static str) -> TableError {
        let found = if self.doomed { "released" } else { self.state.name() };
        TableError::WrongState { id: self.id.to_string(), found, wanted }
    }
}

/// A KV cache group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Group {
    /// Tokens per block.
    pub block_tokens: u64,
    /// Whether a block holds a state after all tokens up to some token in it, instead of KV
    /// for each of its tokens.
    pub state: bool,
}

impl Group {
    /// A group of attention layers.
    pub fn attention(block_tokens: u64) -> Self {
        Self { block_tokens, state: false }
    }

    /// A group of recurrent layers.
    pub fn state(block_tokens: u64) -> Self {
        Self { block_tokens, state: true }
    }

    /// Positions in the block table of `num_tokens` tokens.
    fn positions(&self, num_tokens: u64) -> usize {
        num_tokens.div_ceil(self.block_tokens) as usize
    }

    /// The position where the state after `num_tokens` tokens is, in a state group.
    fn state_position(&self, num_tokens: u64) -> Option<usize> {
        (self.state && num_tokens > 0).then(|| self.positions(num_tokens) - 1)
    }
}

/// A preserved request, for whoever looks into the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// The request's id.
    pub id: String,
    /// Its state.
    pub state: State,
    /// Host blocks it has a reference to, of all groups.
    pub blocks: Vec<BlockId>,
}

/// The preserved requests of one scheduler.
pub struct RequestTable {
    pool: Arc<BlockPool>,
    groups: Vec<Group>,
    entries: CowMap<Arc<str>, Entry>,
    clock: AtomicU64,
}

const BUCKETS: usize = if cfg!(loom) { 1 } else { 1024 };

impl RequestTable {
    /// An empty table over `pool` for these KV cache groups.
    pub fn new(pool: Arc<BlockPool>, groups: Vec<Group>) -> Self {
        Self { pool, groups, entries: CowMap::new(BUCKETS), clock: AtomicU64::new(0) }
    }

    /// The state of a request and its tokens on the host, if it is preserved.
    pub fn status(&self, id: &str) -> Option<(State, u64)> {
        let entry = self.entries.get(id).filter(|entry| !entry.doomed)?;
        Some((entry.state, entry.num_tokens))
    }

    /// Requests in each state, in the order Storing, Ready, Loading, Mirrored. Doomed
    /// ones count until their copy has ended.
    pub fn counts(&self) -> [usize; 4] {
        let mut counts = [0; 4];
        for entry in self.entries.values() {
            counts[match entry.state {
                State::Storing { .. } => 0,
                State::Ready => 1,
                State::Loading => 2,
                State::Mirrored => 3,
            }] += 1;
        }
        counts
    }

    /// Every request in the table, doomed ones included.
    pub fn snapshot(&self) -> Vec<Snapshot> {
        self.entries
            .values()
            .map(|entry| Snapshot {
                id: entry.id.to_string(),
                state: entry.state,
                blocks: entry.blocks(),
            })
            .collect()
    }

    /// Plans to store the first `num_tokens` tokens of a request and claims host blocks.
    ///
    /// `device` has the request's device block table for each group, 0 where there is
    /// no block. Longer tables are cut to the tokens (lookahead blocks are not kept),
    /// shorter ones end where the tokens end. `keys` has, for each group, the keys of
    /// the leading blocks that may be shared, or nothing. What the request's mirror has
    /// and the request no longer (it left a sliding window) is given up first.
    ///
    /// # Errors
    /// [`TableError::Capacity`], [`TableError::WrongState`] unless the request is
    /// unknown or Mirrored, [`TableError::GroupCount`], [`TableError::TooLong`],
    /// [`TableError::NoStateBlock`].
    pub fn begin_store(
        &self,
        id: &str,
        event: u64,
        num_tokens: u64,
        device: &[Vec<u32>],
        keys: &[Vec<BlockKey>],
    ) -> Result<CopyPlan, TableError> {
        self.check_groups(device.len())?;
        let tokens = self.groups.iter().map(|group| group.block_tokens);
        if let Some(block_tokens) = tokens.min().filter(|t| num_tokens.div_ceil(*t) > MAX_BLOCKS) {
            return Err(TableError::TooLong { num_tokens, block_tokens });
        }
        loop {
            let current = self.entries.get(id);
            if let Some(entry) = current.as_ref().filter(|e| e.doomed || e.state != State::Mirrored)
            {
                return Err(entry.wrong_state("Mirrored"));
            }
            let generation = self.pool.generation();
            let mut draft = Draft::new(&self.groups, num_tokens, device)?;
            if let Some(mirror) = &current {
                draft.take_mirrored(mirror);
                let unused = draft.unused(mirror);
                if !unused.is_empty() {
                    let tables = draft.tables.into();
                    let rest = Entry { tables, ..mirror.with(State::Mirrored, false) };
                    if self.replace(mirror, Some(Arc::new(rest)))? {
                        self.pool.release(&unused)?;
                    }
                    continue;
                }
            }
            draft.take_shared(&self.pool, keys);
            let claimed = match self.claim(draft.missing.len(), id) {
                Ok(claimed) => claimed,
                Err(error) => {
                    self.pool.release(&draft.shared)?;
                    return Err(error);
                }
            };
            draft.place(&claimed);
            let stored_keys = draft.keys_of_pairs(keys);
            let entry = Entry {
                id: id.into(),
                state: State::Storing { event },
                doomed: false,
                num_tokens,
                tables: draft.tables.into(),
                keys: stored_keys.into(),
                generation,
                stamp: 0,
            };
            let key = entry.id.clone();
            if self.entries.compare_exchange(&key, current.as_ref(), Some(Arc::new(entry))) {
                return Ok(CopyPlan {
                    pairs: draft.pairs,
                    mirrored: draft.mirrored,
                    shared: draft.shared.len(),
                });
            }
            // The mirror was evicted meanwhile: start again without it.
            self.pool.release(&claimed)?;
            self.pool.release(&draft.shared)?;
        }
    }

    /// Ends a store that every worker has reported. `true`: the request is Ready now;
    /// `false`: it is gone, because the store failed or the request was released. For
    /// whoever got the last report of `event`: two threads may not end the same store.
    ///
    /// # Errors
    /// [`TableError::UnknownRequest`], [`TableError::WrongState`] unless it is Storing
    /// under `event`.
    pub fn complete_store(&self, id: &str, event: u64, ok: bool) -> Result<bool, TableError> {
        loop {
            let current = self.entry(id)?;
            if current.state != (State::Storing { event }) {
                return Err(current.wrong_state("Storing under this event"));
            }
            if ok {
                // Before the transition, while the entry holds the blocks for certain.
                for (block, key) in current.keys.iter() {
                    self.pool.index_since(current.generation, *block, key)?;
                }
            }
            let keep = ok && !current.doomed;
            let next = keep
                .then(|| Arc::new(Entry { keys: [].into(), ..current.with(State::Ready, false) }));
            if self.replace(&current, next)? {
                return Ok(keep);
            }
        }
    }

    /// Plans to restore the tokens from `from_tokens` (computed on the device already)
    /// to `num_tokens` into the blocks of `device`, one block table for each group.
    ///
    /// # Errors
    /// [`TableError::UnknownRequest`], [`TableError::WrongState`] unless it is Ready,
    /// [`TableError::TooManyTokens`], [`TableError::GroupCount`],
    /// [`TableError::ShortTable`], [`TableError::NotStored`], [`TableError::NoStateBlock`],
    /// [`TableError::OtherState`].
    pub fn begin_load(
        &self,
        id: &str,
        from_tokens: u64,
        num_tokens: u64,
        device: &[Vec<u32>],
    ) -> Result<CopyPlan, TableError> {
        self.check_groups(device.len())?;
        loop {
            let current = self.entry(id)?;
            if current.state != State::Ready {
                return Err(current.wrong_state("Ready"));
            }
            if num_tokens > current.num_tokens {
                return Err(TableError::TooManyTokens {
                    id: id.to_owned(),
                    wanted: num_tokens,
                    stored: current.num_tokens,
                });
            }
            let mut plan = CopyPlan::default();
            for (group, kind) in self.groups.iter().enumerate() {
                let needed = kind.positions(num_tokens);
                let blocks = &device[group];
                if blocks.len() < needed {
                    let found = blocks.len();
                    return Err(TableError::ShortTable { group, needed, found });
                }
                let state = kind.state_position(num_tokens);
                if state.is_some_and(|position| blocks[position] == 0) {
                    return Err(TableError::NoStateBlock { group, num_tokens });
                }
                if state.is_some() && num_tokens != current.num_tokens {
                    let (wanted, stored) = (num_tokens, current.num_tokens);
                    return Err(TableError::OtherState { id: id.to_owned(), wanted, stored });
                }
                let first = state.unwrap_or((from_tokens / kind.block_tokens) as usize);
                for (position, &device) in blocks.iter().enumerate().take(needed).skip(first) {
                    let host = current.tables[group][position];
                    if device != 0 && host == 0 {
                        let id = id.to_owned();
                        return Err(TableError::NotStored { id, group, position });
                    }
                    if device != 0 {
                        plan.pairs.push(BlockPair { group: group as u32, device, host });
                    }
                }
            }
            let next = Entry { num_tokens, ..current.with(State::Loading, false) };
            if self.replace(&current, Some(Arc::new(next)))? {
                return Ok(plan);
            }
        }
    }

    /// Ends a load that every worker has reported; the request is Mirrored or, if the
    /// load failed or the request was released, gone.
    ///
    /// # Errors
    /// [`TableError::UnknownRequest`], [`TableError::WrongState`] unless it is Loading.
    pub fn finish_load(&self, id: &str, ok: bool) -> Result<(), TableError> {
        self.mirror(id, State::Loading, ok, u64::MAX)
    }

    /// Makes a Ready request Mirrored, because it was scheduled without being restored.
    /// Only its first `num_tokens` tokens are known to be those that were stored: drafts
    /// may have been rejected since, and what they have in a block will be overwritten.
    ///
    /// # Errors
    /// [`TableError::UnknownRequest`], [`TableError::WrongState`] unless it is Ready.
    pub fn settle(&self, id: &str, num_tokens: u64) -> Result<(), TableError> {
        self.mirror(id, State::Ready, true, num_tokens)
    }

    fn mirror(&self, id: &str, from: State, ok: bool, num_tokens: u64) -> Result<(), TableError> {
        loop {
            let current = self.entry(id)?;
            if current.state != from {
                return Err(current.wrong_state(from.name()));
            }
            let num_tokens = num_tokens.min(current.num_tokens);
            let mut partial = Vec::new();
            let next = (ok && !current.doomed).then(|| {
                let mut tables = current.tables.to_vec();
                for (table, group) in tables.iter_mut().zip(&self.groups) {
                    let full = if group.state { 0 } else { num_tokens / group.block_tokens };
                    let full = full as usize;
                    partial.extend(table.drain(full.min(table.len())..).filter(|&b| b != 0));
                }
                Arc::new(Entry {
                    num_tokens,
                    tables: tables.into(),
                    stamp: self.clock.fetch_add(1, Ordering::Relaxed),
                    ..current.with(State::Mirrored, false)
                })
            });
            if self.replace(&current, next)? {
                self.pool.release(&partial)?;
                return Ok(());
            }
        }
    }

    /// Forgets a request that has ended; `false` if it was not preserved. Blocks that a
    /// copy still uses go back when that copy has ended.
    ///
    /// # Errors
    /// [`TableError::Pool`] if a block was misused.
    pub fn release(&self, id: &str) -> Result<bool, TableError> {
        loop {
            let Some(current) = self.entries.get(id) else { return Ok(false) };
            let next = match current.state {
                State::Storing { .. } | State::Loading => {
                    Some(Arc::new(current.with(current.state, true)))
                }
                State::Ready | State::Mirrored => None,
            };
            if self.replace(&current, next)? {
                return Ok(!current.doomed);
            }
        }
    }

    /// Forgets every request that is preserved and every shared block, because the KV is
    /// no longer valid.
    ///
    /// # Errors
    /// [`TableError::Pool`] if a block was misused.
    pub fn release_all(&self) -> Result<(), TableError> {
        // First, so that the blocks released below are free and not evictable.
        self.pool.clear_index();
        let ids: Vec<_> = self.entries.values().map(|entry| entry.id.clone()).collect();
        for id in ids {
            self.release(&id)?;
        }
        Ok(())
    }

    fn check_groups(&self, found: usize) -> Result<(), TableError> {
        let expected = self.groups.len();
        if found == expected { Ok(()) } else { Err(TableError::GroupCount { expected, found }) }
    }

    fn entry(&self, id: &str) -> Result<Arc<Entry>, TableError> {
        self.entries.get(id).ok_or_else(|| TableError::UnknownRequest { id: id.to_owned() })
    }

    /// One transition; without `next`, the entry goes and its blocks are released.
    fn replace(&self, current: &Arc<Entry>, next: Option<Arc<Entry>>) -> Result<bool, TableError> {
        let gone = next.is_none();
        let won = self.entries.compare_exchange(&current.id, Some(current), next);
        if won && gone {
            self.pool.release(&current.blocks())?;
        }
        Ok(won)
    }

    /// Claims `n` blocks, at the cost of other requests' mirrors if it must.
    fn claim(&self, n: usize, id: &str) -> Result<Vec<BlockId>, TableError> {
        loop {
            let available = match self.pool.claim(n) {
                Ok(claimed) => return Ok(claimed),
                Err(PoolError::Exhausted { available, .. }) => available,
                Err(error) => return Err(error.into()),
            };
            let mut mirrors: Vec<_> = self
                .entries
                .values()
                .filter(|entry| entry.state == State::Mirrored && &*entry.id != id)
                .collect();
            let available = available + self.held_by_mirrors_alone(&mirrors);
            if available < n {
                let capacity = self.pool.capacity();
                return Err(TableError::Capacity { needed: n, available, capacity });
            }
            mirrors.sort_by_key(|entry| entry.stamp);
            for mirror in mirrors {
                if self.pool.num_available() >= n {
                    break;
                }
                self.replace(&mirror, None)?;
            }
        }
    }

    /// Blocks that would be available if all of `mirrors` gave way.
    fn held_by_mirrors_alone(&self, mirrors: &[Arc<Entry>]) -> usize {
        let mut blocks: Vec<_> = mirrors.iter().flat_map(|mirror| mirror.blocks()).collect();
        blocks.sort_unstable();
        let references = blocks.chunk_by(|a, b| a == b);
        references.filter(|of| self.pool.ref_count(of[0]) == Ok(of.len() as u32)).count()
    }
}

/// A store being planned.
struct Draft {
    tables: Vec<Vec<BlockId>>,
    /// Group, position and device block of what has no host block yet.
    missing: Vec<(usize, usize, u32)>,
    mirrored: usize,
    shared: Vec<BlockId>,
    pairs: Vec<BlockPair>,
}

impl Draft {
    fn new(groups: &[Group], num_tokens: u64, device: &[Vec<u32>]) -> Result<Self, TableError> {
        let mut tables = Vec::with_capacity(device.len());
        let mut missing = Vec::with_capacity(device.iter().map(Vec::len).sum());
        for (group, (blocks, kind)) in device.iter().zip(groups).enumerate() {
            let positions = kind.positions(num_tokens);
            let absent = positions.saturating_sub(blocks.len());
            let state = kind.state_position(num_tokens);
            let kept = (absent..positions)
                .zip(blocks)
                .filter(|&(position, &device)| device != 0 && position >= state.unwrap_or(0));
            let before = missing.len();
            missing.extend(kept.map(|(position, &device)| (group, position, device)));
            if state.is_some() && missing.len() == before {
                return Err(TableError::NoStateBlock { group, num_tokens });
            }
            tables.push(vec![0; positions]);
        }
        Ok(Self { tables, missing, mirrored: 0, shared: Vec::new(), pairs: Vec::new() })
    }

    /// Takes over what the request's own mirror has.
    fn take_mirrored(&mut self, mirror: &Entry) {
        let Self { tables, missing, mirrored, .. } = self;
        missing.retain(|&(group, position, _)| {
            let host = mirror.tables[group].get(position).copied().unwrap_or(0);
            if host != 0 {
                tables[group][position] = host;
                *mirrored += 1;
            }
            host == 0
        });
    }

    /// The blocks of `mirror` that were not taken over.
    fn unused(&self, mirror: &Entry) -> Vec<BlockId> {
        let mut unused = Vec::new();
        for (had, taken) in mirror.tables.iter().zip(&self.tables) {
            let blocks = had.iter().enumerate().filter(|&(_, &host)| host != 0);
            unused.extend(blocks.filter(|&(i, host)| taken.get(i) != Some(host)).map(|(_, &b)| b));
        }
        unused
    }

    /// Takes a reference to what other requests have stored under the same key.
    fn take_shared(&mut self, pool: &BlockPool, keys: &[Vec<BlockKey>]) {
        let Self { tables, missing, shared, .. } = self;
        missing.retain(|&(group, position, _)| {
            let key = keys.get(group).and_then(|keys| keys.get(position));
            let found = key.and_then(|key| pool.lookup(key));
            if let Some(host) = found {
                tables[group][position] = host;
                shared.push(host);
            }
            found.is_none()
        });
    }

    /// Gives the missing blocks their host blocks: neighbours on the device become
    /// neighbours on the host wherever the claim allows, so that copies coalesce.
    fn place(&mut self, claimed: &[BlockId]) {
        self.missing.sort_unstable_by_key(|&(group, _, device)| (group, device));
        self.pairs.reserve_exact(claimed.len());
        for (&(group, position, device), &host) in self.missing.iter().zip(claimed) {
            self.tables[group][position] = host;
            self.pairs.push(BlockPair { group: group as u32, device, host });
        }
    }

    fn keys_of_pairs(&self, keys: &[Vec<BlockKey>]) -> Vec<(BlockId, BlockKey)> {
        let placed = self.missing.iter().zip(&self.pairs);
        placed
            .filter_map(|(&(group, position, _), pair)| {
                Some((pair.host, *keys.get(group)?.get(position)?))
            })
            .collect()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    const STATES: [&str; 5] = ["Storing", "Ready", "Loading", "Mirrored", "released"];

    fn table(capacity: u32, block_tokens: &[u64]) -> (Arc<BlockPool>, RequestTable) {
        let pool = Arc::new(BlockPool::new(capacity, true));
        let groups = block_tokens.iter().copied().map(Group::attention).collect();
        (pool.clone(), RequestTable::new(pool, groups))
    }

    fn key(n: u32) -> BlockKey {
        BlockKey::new(&n.to_le_bytes(), 0).unwrap()
    }

    fn pair(group: u32, device: u32, host: BlockId) -> BlockPair {
        BlockPair { group, device, host }
    }

    /// Brings a request of `num_tokens` tokens into a state.
    fn bring(
        table: &RequestTable,
        id: &str,
        state: &str,
        num_tokens: u64,
        device: &[Vec<u32>],
        keys: &[Vec<BlockKey>],
    ) {
        table.begin_store(id, 0, num_tokens, device, keys).unwrap();
        if state == "released" {
            assert_eq!(table.release(id), Ok(true));
        }
        if ["Storing", "released"].contains(&state) {
            return;
        }
        assert_eq!(table.complete_store(id, 0, true), Ok(true));
        if state == "Mirrored" {
            table.settle(id, num_tokens).unwrap();
        } else if state == "Loading" {
            table.begin_load(id, 0, num_tokens, device).unwrap();
        }
    }

    fn state(table: &RequestTable, id: &str) -> Option<(&'static str, u64)> {
        table.status(id).map(|(state, tokens)| (state.name(), tokens))
    }

    #[test]
    fn a_request_goes_around_the_diagram_and_leaves_nothing() {
        let (pool, table) = table(8, &[16]);
        let plan = table.begin_store("a", 5, 40, &[vec![11, 12, 13]], &[]).unwrap();
        assert_eq!(plan.pairs, [pair(0, 11, 1), pair(0, 12, 2), pair(0, 13, 3)]);
        assert_eq!((plan.mirrored, plan.shared), (0, 0));
        assert_eq!(table.status("a"), Some((State::Storing { event: 5 }, 40)));
        assert_eq!((table.counts(), pool.num_free()), ([1, 0, 0, 0], 5));

        assert_eq!(table.complete_store("a", 5, true), Ok(true));
        assert_eq!(table.status("a"), Some((State::Ready, 40)));
        assert_eq!((table.counts(), pool.num_free()), ([0, 1, 0, 0], 5));

        let plan = table.begin_load("a", 0, 39, &[vec![31, 32, 33]]).unwrap();
        assert_eq!(plan.pairs, [pair(0, 31, 1), pair(0, 32, 2), pair(0, 33, 3)]);
        assert_eq!(table.status("a"), Some((State::Loading, 39)));
        assert_eq!((table.counts(), pool.num_free()), ([0, 0, 1, 0], 5));

        // The partial block is given up, the full ones stay.
        table.finish_load("a", true).unwrap();
        assert_eq!(table.status("a"), Some((State::Mirrored, 39)));
        assert_eq!((table.counts(), pool.num_free()), ([0, 0, 0, 1], 6));

        // The next preemption stores what is new: the third block again, and a fourth.
        let plan = table.begin_store("a", 6, 50, &[vec![31, 32, 33, 34]], &[]).unwrap();
        assert_eq!(plan.pairs, [pair(0, 33, 3), pair(0, 34, 4)]);
        assert_eq!((plan.mirrored, plan.shared), (2, 0));
        assert_eq!(table.complete_store("a", 6, true), Ok(true));
        let plan = table.begin_load("a", 0, 50, &[vec![1, 2, 3, 4]]).unwrap();
        let expected: Vec<_> = (1..=4).map(|i| pair(0, i, i)).collect();
        assert_eq!(plan.pairs, expected);
        table.finish_load("a", true).unwrap();
        assert_eq!(table.release("a"), Ok(true));
        assert_eq!((table.counts(), pool.num_free()), ([0; 4], 8));
        assert_eq!(table.release("a"), Ok(false));
    }

    #[test]
    fn failed_copies_leave_nothing() {
        let (pool, table) = table(4, &[16]);
        let device = [vec![1, 2]];
        bring(&table, "a", "Storing", 32, &device, &[vec![key(1), key(2)]]);
        assert_eq!(table.complete_store("a", 0, false), Ok(false));
        assert_eq!((table.status("a"), pool.num_free()), (None, 4));
        assert_eq!(pool.lookup(&key(1)), None);
        bring(&table, "a", "Loading", 32, &device, &[]);
        table.finish_load("a", false).unwrap();
        assert_eq!((table.status("a"), pool.num_free()), (None, 4));
    }

    #[test]
    fn a_settled_request_leaves_its_full_blocks() {
        let (pool, table) = table(8, &[16, 4]);
        bring(&table, "a", "Mirrored", 18, &[vec![1, 2], vec![3, 4, 5, 6, 7]], &[]);
        assert_eq!(state(&table, "a"), Some(("Mirrored", 18)));
        assert_eq!(pool.num_free(), 8 - 1 - 4);
    }

    #[test]
    fn a_settled_request_keeps_no_block_with_a_rejected_draft() {
        let (pool, table) = table(8, &[16, 4]);
        let device = [vec![1, 2, 3], (11..=15).collect()];
        bring(&table, "a", "Ready", 48, &[device[0].clone(), vec![]], &[]);
        bring(&table, "b", "Ready", 20, &[vec![], device[1].clone()], &[]);
        // The last two tokens of the third block were drafts.
        table.settle("a", 46).unwrap();
        assert_eq!(state(&table, "a"), Some(("Mirrored", 46)));
        table.settle("b", u64::MAX).unwrap();
        assert_eq!(state(&table, "b"), Some(("Mirrored", 20)));
        assert_eq!(pool.num_free(), 8 - 2 - 5);
        let plan = table.begin_store("a", 1, 48, &[device[0].clone(), vec![]], &[]).unwrap();
        assert_eq!((plan.mirrored, plan.pairs), (2, vec![pair(0, 3, 3)]));
    }

    #[test]
    fn a_released_request_gives_its_blocks_back_once_no_copy_uses_them() {
        for name in STATES {
            for ok in [true, false] {
                let (pool, table) = table(4, &[16]);
                bring(&table, "a", name, 32, &[vec![1, 2]], &[]);
                let copying = ["Storing", "Loading", "released"].contains(&name);
                assert_eq!(table.release("a"), Ok(name != "released"), "{name}");
                assert_eq!(table.status("a"), None, "{name}");
                assert_eq!(pool.num_free(), if copying { 2 } else { 4 }, "{name}");
                // Once more changes nothing.
                assert_eq!(table.release("a"), Ok(false), "{name}");
                match name {
                    "Storing" | "released" => {
                        assert_eq!(table.counts(), [1, 0, 0, 0]);
                        assert_eq!(table.complete_store("a", 0, ok), Ok(false));
                    }
                    "Loading" => {
                        assert_eq!(table.counts(), [0, 0, 1, 0]);
                        table.finish_load("a", ok).unwrap();
                    }
                    _ => {}
                }
                assert_eq!((table.counts(), pool.num_free()), ([0; 4], 4), "{name}");
            }
        }
    }

    #[test]
    fn what_a_released_request_has_stored_may_still_be_shared() {
        let (pool, table) = table(4, &[16]);
        bring(&table, "a", "released", 32, &[vec![1, 2]], &[vec![key(1), key(2)]]);
        assert_eq!(table.complete_store("a", 0, true), Ok(false));
        assert_eq!((pool.num_free(), pool.num_evictable()), (2, 2));
        let plan = table.begin_store("b", 1, 32, &[vec![5, 6]], &[vec![key(1), key(2)]]).unwrap();
        assert_eq!((plan.pairs.len(), plan.shared), (0, 2));
    }

    #[test]
    fn wrong_states_are_named_and_change_nothing() {
        for name in STATES {
            let (pool, table) = table(4, &[16]);
            let device = [vec![1, 2]];
            bring(&table, "a", name, 20, &device, &[]);
            let before = (table.status("a"), table.counts(), pool.num_free());
            let wrong =
                |wanted| Some(TableError::WrongState { id: "a".to_owned(), found: name, wanted });
            let copying = ["Storing", "released"].contains(&name);
            if name != "Mirrored" {
                let error = table.begin_store("a", 1, 20, &device, &[]).err();
                assert_eq!(error, wrong("Mirrored"));
            }
            // Storing under another event is wrong as well.
            for event in if copying { [1, 2] } else { [0, 1] } {
                let error = table.complete_store("a", event, true).err();
                assert_eq!(error, wrong("Storing under this event"));
            }
            if name != "Ready" {
                assert_eq!(table.begin_load("a", 0, 20, &device).err(), wrong("Ready"));
                assert_eq!(table.settle("a", 20).err(), wrong("Ready"));
            }
            if name != "Loading" {
                assert_eq!(table.finish_load("a", true).err(), wrong("Loading"));
            }
            assert_eq!((table.status("a"), table.counts(), pool.num_free()), before);
        }
        let (_, table) = table(4, &[16]);
        let unknown = TableError::UnknownRequest { id: "b".to_owned() };
        assert_eq!(unknown.to_string(), "request \"b\" is not preserved");
        let unknown = Some(unknown);
        assert_eq!(table.complete_store("b", 0, true).err(), unknown);
        assert_eq!(table.begin_load("b", 0, 1, &[vec![1]]).err(), unknown);
        assert_eq!(table.finish_load("b", true).err(), unknown);
        assert_eq!(table.settle("b", 1).err(), unknown);
        bring(&table, "a", "Ready", 1, &[vec![1]], &[]);
        let error = table.finish_load("a", true).unwrap_err();
        assert_eq!(error.to_string(), "request \"a\" is Ready, not Loading");
    }

    #[test]
    fn null_blocks_keep_their_place_and_are_not_copied() {
        let (pool, table) = table(8, &[16]);
        let plan = table.begin_store("a", 0, 64, &[vec![0, 0, 20, 21]], &[]).unwrap();
        assert_eq!(plan.pairs, [pair(0, 20, 1), pair(0, 21, 2)]);
        assert_eq!(pool.num_free(), 6);
        table.complete_store("a", 0, true).unwrap();
        let missing = table.begin_load("a", 0, 64, &[vec![0, 31, 32, 33]]);
        let error = TableError::NotStored { id: "a".to_owned(), group: 0, position: 1 };
        assert_eq!(missing, Err(error));
        assert_eq!(state(&table, "a"), Some(("Ready", 64)));
        let plan = table.begin_load("a", 0, 64, &[vec![0, 0, 32, 33]]).unwrap();
        assert_eq!(plan.pairs, [pair(0, 32, 1), pair(0, 33, 2)]);
    }

    #[test]
    fn short_tables_end_where_the_tokens_end_and_long_ones_are_cut_there() {
        let (pool, table) = table(8, &[16, 16]);
        let device = [vec![20, 21], vec![1, 2, 3, 4, 5, 6]];
        let plan = table.begin_store("a", 0, 50, &device, &[]).unwrap();
        let stored: Vec<_> = plan.pairs.iter().map(|pair| (pair.group, pair.device)).collect();
        assert_eq!(stored, [(0, 20), (0, 21), (1, 1), (1, 2), (1, 3), (1, 4)]);
        assert_eq!(pool.num_free(), 2);
        table.complete_store("a", 0, true).unwrap();
        let device = [vec![0, 0, 31, 32], vec![41, 42, 43, 44, 45]];
        let plan = table.begin_load("a", 0, 50, &device).unwrap();
        let host = |device| plan.pairs.iter().find(|pair| pair.device == device).unwrap().host;
        assert_eq!([31, 32, 41, 42, 43, 44].map(host), [1, 2, 3, 4, 5, 6]);
        assert_eq!(plan.pairs.len(), 6);
    }

    #[test]
    fn neighbours_on_the_device_become_neighbours_on_the_host() {
        let (_, table) = table(8, &[16]);
        let plan = table.begin_store("a", 0, 64, &[vec![9, 3, 8, 2]], &[]).unwrap();
        let pairs = [pair(0, 2, 1), pair(0, 3, 2), pair(0, 8, 3), pair(0, 9, 4)];
        assert_eq!(plan.pairs, pairs);
        table.complete_store("a", 0, true).unwrap();
        let plan = table.begin_load("a", 0, 64, &[vec![1, 2, 3, 4]]).unwrap();
        let by_position: Vec<_> = plan.pairs.iter().map(|pair| pair.host).collect();
        assert_eq!(by_position, [4, 2, 3, 1]);
    }

    #[test]
    fn a_load_begins_at_the_block_of_the_first_token_wanted() {
        let (pool, table) = table(16, &[16, 8]);
        bring(&table, "a", "Ready", 48, &[vec![1, 2, 3], vec![11, 12, 13, 14, 15, 16]], &[]);
        let plan = table.begin_load("a", 20, 40, &[vec![1, 2, 3], vec![4, 5, 6, 7, 8]]);
        let device: Vec<_> = plan.unwrap().pairs.iter().map(|p| (p.group, p.device)).collect();
        assert_eq!(device, [(0, 2), (0, 3), (1, 6), (1, 7), (1, 8)]);
        // 40 tokens were restored: two full blocks of 16 and five of 8 stay.
        assert_eq!(state(&table, "a"), Some(("Loading", 40)));
        table.finish_load("a", true).unwrap();
        assert_eq!(pool.num_free(), 16 - 7);
    }

    #[test]
    fn wrong_loads_are_errors_and_change_nothing() {
        let (pool, table) = table(8, &[16, 16]);
        bring(&table, "a", "Ready", 32, &[vec![1, 2], vec![3, 4]], &[]);
        let load = |tokens, device: &[Vec<u32>]| {
            let error = table.begin_load("a", 0, tokens, device).unwrap_err();
            assert_eq!((state(&table, "a"), pool.num_free()), (Some(("Ready", 32)), 4));
            (error.to_string(), error)
        };
        let (text, error) = load(33, &[vec![1, 2, 3], vec![1, 2, 3]]);
        assert_eq!(error, TableError::TooManyTokens { id: "a".into(), wanted: 33, stored: 32 });
        assert_eq!(text, "33 tokens of request \"a\" wanted, 32 are stored");
        let (text, error) = load(32, &[vec![1, 2], vec![3]]);
        assert_eq!(error, TableError::ShortTable { group: 1, needed: 2, found: 1 });
        assert_eq!(text, "group 1 has 1 device blocks for 2 blocks to restore");
        let (text, error) = load(32, &[vec![1, 2]]);
        assert_eq!(error, TableError::GroupCount { expected: 2, found: 1 });
        assert_eq!(text, "1 block tables given for 2 KV cache groups");
        let store = table.begin_store("b", 0, 1, &[vec![1], vec![1], vec![1]], &[]);
        assert_eq!(store, Err(TableError::GroupCount { expected: 2, found: 3 }));
    }

    #[test]
    fn a_request_longer_than_any_is_an_error_and_no_allocation() {
        let (pool, table) = table(8, &[1 << 40, 16]);
        for num_tokens in [16 * MAX_BLOCKS + 1, u64::MAX] {
            let error = table.begin_store("a", 0, num_tokens, &[vec![], vec![]], &[]).unwrap_err();
            assert_eq!(error, TableError::TooLong { num_tokens, block_tokens: 16 });
        }
        let error = TableError::TooLong { num_tokens: 1 << 30, block_tokens: 16 };
        let text = "1073741824 tokens in blocks of 16; a request has at most 16777216 blocks";
        assert_eq!(error.to_string(), text);
        assert_eq!((table.status("a"), pool.num_free()), (None, 8));
    }

    #[test]
    fn a_shortage_has_the_numbers_and_leaves_everything() {
        let (pool, table) = table(10, &[16]);
        bring(&table, "ready", "Ready", 48, &[vec![1, 2, 3]], &[]);
        bring(&table, "mirror", "Mirrored", 32, &[vec![4, 5]], &[vec![key(4), key(5)]]);
        bring(&table, "gone", "Ready", 16, &[vec![6]], &[vec![key(6)]]);
        table.release("gone").unwrap();
        let before = (table.counts(), pool.num_free(), pool.num_evictable());
        assert_eq!(before, ([0, 1, 0, 1], 4, 1));
        let device = [(1..=8).collect()];
        let error = table.begin_store("new", 0, 128, &device, &[]).unwrap_err();
        assert_eq!(error, TableError::Capacity { needed: 8, available: 7, capacity: 10 });
        assert_eq!(error.to_string(), "8 host blocks needed, 7 of 10 available");
        assert_eq!((table.counts(), pool.num_free(), pool.num_evictable()), before);
        assert_eq!(table.status("new"), None);
        // With one block shared it fits, at the cost of the mirror.
        let keys = [vec![key(6)]];
        let plan = table.begin_store("new", 0, 128, &device, &keys).unwrap_err();
        assert_eq!(plan, TableError::Capacity { needed: 7, available: 6, capacity: 10 });
        let keys = [vec![key(4), key(5)]];
        let plan = table.begin_store("new", 0, 112, &[(1..=7).collect()], &keys).unwrap();
        assert_eq!((plan.shared, plan.pairs.len()), (2, 5));
    }

    #[test]
    fn mirrors_give_way_the_longest_unused_first_and_only_as_far_as_needed() {
        let (pool, table) = table(6, &[16]);
        for (id, device) in [("a", 1), ("b", 3), ("c", 5)] {
            bring(&table, id, "Ready", 32, &[vec![device, device + 1]], &[]);
        }
        for id in ["b", "a", "c"] {
            table.settle(id, 32).unwrap();
        }
        let plan = table.begin_store("d", 0, 48, &[vec![7, 8, 9]], &[]).unwrap();
        assert_eq!(plan.pairs.len(), 3);
        assert_eq!((table.status("b"), table.status("a")), (None, None));
        assert_eq!(state(&table, "c"), Some(("Mirrored", 32)));
        assert_eq!(pool.num_free(), 1);
        // A mirror evicted meanwhile: the request is stored as if it were new.
        let plan = table.begin_store("a", 1, 48, &[vec![1, 2, 3]], &[]).unwrap();
        assert_eq!((plan.mirrored, plan.pairs.len(), table.status("c")), (0, 3, None));
    }

    #[test]
    fn the_requests_own_mirror_is_used_not_evicted() {
        let (pool, table) = table(4, &[16]);
        bring(&table, "a", "Mirrored", 32, &[vec![1, 2]], &[]);
        bring(&table, "b", "Mirrored", 32, &[vec![3, 4]], &[]);
        let plan = table.begin_store("a", 0, 64, &[vec![1, 2, 3, 4]], &[]).unwrap();
        assert_eq!((plan.mirrored, plan.pairs.len()), (2, 2));
        assert_eq!((table.status("b"), pool.num_free()), (None, 0));
        table.complete_store("a", 0, true).unwrap();
        table.settle("a", 64).unwrap();
        let error = table.begin_store("a", 0, 80, &[vec![1, 2, 3, 4, 5]], &[]).unwrap_err();
        assert_eq!(error, TableError::Capacity { needed: 1, available: 0, capacity: 4 });
        assert_eq!(state(&table, "a"), Some(("Mirrored", 64)));
    }

    #[test]
    fn no_mirror_is_evicted_for_blocks_that_others_hold_as_well() {
        let (pool, table) = table(4, &[16]);
        let keys = [vec![key(1), key(2)]];
        for id in ["a", "b", "c"] {
            bring(&table, id, "Ready", 32, &[vec![1, 2]], &keys);
        }
        table.settle("a", 32).unwrap();
        table.settle("b", 32).unwrap();
        assert_eq!(pool.num_free(), 2);
        // The two mirrors share both blocks with each other, and with "c".
        let error = table.begin_store("d", 0, 48, &[vec![5, 6, 7]], &[]).unwrap_err();
        assert_eq!(error, TableError::Capacity { needed: 3, available: 2, capacity: 4 });
        assert_eq!(table.counts(), [0, 1, 0, 2]);
        table.settle("c", 32).unwrap();
        let error = table.begin_store("d", 0, 80, &[vec![5, 6, 7, 8, 9]], &[]).unwrap_err();
        assert_eq!(error, TableError::Capacity { needed: 5, available: 4, capacity: 4 });
        assert_eq!(table.counts(), [0, 0, 0, 3]);
        table.begin_store("d", 0, 48, &[vec![5, 6, 7]], &[]).unwrap();
        assert_eq!(table.counts(), [1, 0, 0, 0]);
        table.release_all().unwrap();
        table.complete_store("d", 0, true).unwrap();
        assert_eq!(pool.num_free(), 4);
    }

    #[test]
    fn a_mirror_gives_up_what_left_the_sliding_window_even_if_nothing_else_is_free() {
        let (pool, table) = table(4, &[16]);
        bring(&table, "a", "Mirrored", 64, &[vec![0, 1, 2, 3]], &[]);
        bring(&table, "b", "Ready", 16, &[vec![9]], &[]);
        assert_eq!(pool.num_free(), 0);
        let device = [vec![0, 0, 0, 3, 4, 5]];
        let plan = table.begin_store("a", 0, 96, &device, &[]).unwrap();
        assert_eq!((plan.mirrored, plan.pairs.len(), pool.num_free()), (1, 2, 0));
        assert_eq!(table.complete_store("a", 0, true), Ok(true));
        let plan = table.begin_load("a", 0, 96, &device).unwrap();
        assert_eq!(plan.pairs, [pair(0, 3, 3), pair(0, 4, 1), pair(0, 5, 2)]);
        table.finish_load("a", true).unwrap();
        // Fewer tokens than the mirror has: the rest is given up as well.
        table.begin_store("a", 1, 64, &[vec![0, 0, 0, 3]], &[]).unwrap();
        assert_eq!(pool.num_free(), 2);
    }

    #[test]
    fn what_has_a_key_is_stored_once() {
        let (pool, table) = table(8, &[16]);
        let keys = [vec![key(1), key(2)]];
        table.begin_store("a", 0, 48, &[vec![1, 2, 3]], &keys).unwrap();
        // Not complete yet, so not to be shared.
        let plan = table.begin_store("b", 1, 32, &[vec![4, 5]], &keys).unwrap();
        assert_eq!((plan.shared, plan.pairs.len()), (0, 2));
        table.complete_store("a", 0, true).unwrap();
        table.complete_store("b", 1, true).unwrap();
        let plan = table.begin_store("c", 2, 48, &[vec![6, 7, 8]], &keys).unwrap();
        assert_eq!(plan.shared, 2);
        assert_eq!(plan.pairs, [pair(0, 8, 6)]);
        assert_eq!(pool.ref_count(1), Ok(2));
        table.release("a").unwrap();
        assert_eq!(pool.ref_count(1), Ok(1));
        table.complete_store("c", 2, true).unwrap();
        let plan = table.begin_load("c", 0, 48, &[vec![1, 2, 3]]).unwrap();
        assert_eq!(plan.pairs, [pair(0, 1, 1), pair(0, 2, 2), pair(0, 3, 6)]);
        table.finish_load("c", true).unwrap();
        table.release("b").unwrap();
        table.release("c").unwrap();
        assert_eq!((pool.num_free(), pool.num_evictable()), (6, 2));
    }

    #[test]
    fn the_same_key_twice_in_a_request_takes_and_gives_two_references() {
        let (pool, table) = table(4, &[16]);
        bring(&table, "a", "Ready", 16, &[vec![1]], &[vec![key(1)]]);
        bring(&table, "b", "Mirrored", 32, &[vec![1, 1]], &[vec![key(1), key(1)]]);
        assert_eq!(pool.ref_count(1), Ok(3));
        table.begin_store("b", 0, 32, &[vec![0, 1]], &[]).unwrap();
        assert_eq!(pool.ref_count(1), Ok(2));
        table.release_all().unwrap();
        assert_eq!(table.complete_store("b", 0, true), Ok(false));
        assert_eq!(pool.num_free(), 4);
    }

    #[test]
    fn after_release_all_nothing_is_found_whatever_the_state_was() {
        for name in STATES {
            let (pool, table) = table(8, &[16]);
            let keys = [vec![key(1), key(2)]];
            bring(&table, "a", name, 32, &[vec![1, 2]], &keys);
            bring(&table, "gone", "Ready", 16, &[vec![3]], &[vec![key(3)]]);
            table.release("gone").unwrap();
            table.release_all().unwrap();
            assert_eq!((table.status("a"), pool.num_evictable()), (None, 0), "{name}");
            match name {
                "Storing" | "released" => {
                    assert_eq!(table.complete_store("a", 0, true), Ok(false));
                }
                "Loading" => table.finish_load("a", true).unwrap(),
                _ => {}
            }
            assert_eq!((table.counts(), pool.num_free()), ([0; 4], 8), "{name}");
            let plan = table.begin_store("b", 1, 32, &[vec![1, 2]], &keys).unwrap();
            assert_eq!((plan.shared, plan.pairs.len()), (0, 2), "{name}");
            table.complete_store("b", 1, true).unwrap();
            let plan = table.begin_store("c", 2, 32, &[vec![1, 2]], &keys).unwrap();
            assert_eq!((plan.shared, plan.pairs.len()), (2, 0), "{name}");
        }
    }

    #[test]
    fn misused_blocks_are_reported() {
        let (pool, table) = table(4, &[16]);
        bring(&table, "a", "Ready", 16, &[vec![1]], &[]);
        pool.release(&[1]).unwrap();
        let error = PoolError::Free { id: 1, capacity: 4 };
        assert_eq!(table.release("a"), Err(TableError::Pool(error)));
    }

    #[test]
    fn a_state_is_kept_and_restored_at_its_own_tokens_alone() {
        let pool = Arc::new(BlockPool::new(9, false));
        let table = RequestTable::new(pool.clone(), vec![Group::attention(4), Group::state(8)]);
        let plan =
            table.begin_store("a", 0, 18, &[vec![1, 2, 3, 4, 5], vec![6, 7, 8]], &[]).unwrap();
        let groups_and_devices: Vec<_> = plan.pairs.iter().map(|p| (p.group, p.device)).collect();
        assert_eq!(groups_and_devices, [(0, 1), (0, 2), (0, 3), (0, 4), (0, 5), (1, 8)]);
        let state = plan.pairs[5].host;
        table.complete_store("a", 0, true).unwrap();
        let device = [vec![11, 12, 13, 14, 15], vec![0, 0, 16]];
        let error = table.begin_load("a", 0, 17, &device).unwrap_err();
        assert_eq!(error, TableError::OtherState { id: "a".into(), wanted: 17, stored: 18 });
        let error = table.begin_load("a", 0, 18, &[device[0].clone(), vec![0; 3]]).unwrap_err();
        assert_eq!(error, TableError::NoStateBlock { group: 1, num_tokens: 18 });
        let plan = table.begin_load("a", 16, 18, &device).unwrap();
        assert_eq!(plan.pairs[1..], [pair(1, 16, state)]);
        table.finish_load("a", true).unwrap();
        // The mirror has the full blocks of the attention group, and no state.
        assert_eq!(table.snapshot()[0].blocks.len(), 4);
        assert_eq!(pool.ref_count(state), Ok(0));
    }

    #[test]
    fn a_state_that_the_device_does_not_have_is_not_stored() {
        let pool = Arc::new(BlockPool::new(9, false));
        let table = RequestTable::new(pool.clone(), vec![Group::state(8)]);
        let error = table.begin_store("a", 0, 9, &[vec![1, 0]], &[]).unwrap_err();
        assert_eq!(error, TableError::NoStateBlock { group: 0, num_tokens: 9 });
        assert!(table.status("a").is_none());
        assert_eq!(pool.num_free(), 9);
    }
}
