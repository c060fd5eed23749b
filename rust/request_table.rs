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
//! blocks more evicts the mirror unused for longest.
//!
//! Entries are immutable; a transition replaces one by compare and exchange. The
//! winner owns what the transition sets free. While a copy is under way (Storing,
//! Loading) an entry only gets *doomed*: its blocks go back when the copy has ended.

use std::sync::Arc;

use crate::block_pool::{BlockId, BlockKey, BlockPool, PoolError};
use crate::cow_map::CowMap;
use crate::sync::atomic::{AtomicU64, Ordering};

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

/// Why a transition was refused; the table and the pool are as they were before.
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
            stamp: self.stamp,
        }
    }

    fn wrong_state(&self, wanted: &'static str) -> TableError {
        let found = if self.doomed { "released" } else { self.state.name() };
        TableError::WrongState { id: self.id.to_string(), found, wanted }
    }
}

/// The preserved requests of one scheduler.
pub struct RequestTable {
    pool: Arc<BlockPool>,
    /// Tokens per block, by KV cache group.
    block_tokens: Vec<u64>,
    entries: CowMap<Arc<str>, Entry>,
    clock: AtomicU64,
}

const BUCKETS: usize = if cfg!(loom) { 1 } else { 1024 };

impl RequestTable {
    /// An empty table over `pool`, for groups with `block_tokens` tokens per block.
    pub fn new(pool: Arc<BlockPool>, block_tokens: Vec<u64>) -> Self {
        Self { pool, block_tokens, entries: CowMap::new(BUCKETS), clock: AtomicU64::new(0) }
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

    /// Plans to store the first `num_tokens` tokens of a request and claims host blocks.
    ///
    /// `device` has the request's device block table for each group, 0 where there is
    /// no block. Longer tables are cut to the tokens (lookahead blocks are not kept),
    /// shorter ones end where the tokens end. `keys` has, for each group, the keys of
    /// the leading blocks that may be shared, or nothing.
    ///
    /// # Errors
    /// [`TableError::Capacity`], [`TableError::WrongState`] unless the request is
    /// unknown or Mirrored, [`TableError::GroupCount`].
    pub fn begin_store(
        &self,
        id: &str,
        event: u64,
        num_tokens: u64,
        device: &[Vec<u32>],
        keys: &[Vec<BlockKey>],
    ) -> Result<CopyPlan, TableError> {
        self.check_groups(device.len())?;
        loop {
            let current = self.entries.get(id);
            if let Some(entry) = current.as_ref().filter(|e| e.doomed || e.state != State::Mirrored)
            {
                return Err(entry.wrong_state("Mirrored"));
            }
            let mut draft = Draft::new(&self.block_tokens, num_tokens, device);
            draft.take_mirrored(current.as_deref(), &self.block_tokens);
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
                stamp: 0,
            };
            let key = entry.id.clone();
            if self.entries.compare_exchange(&key, current.as_ref(), Some(Arc::new(entry))) {
                if let Some(old) = current {
                    let mut unused = old.blocks();
                    draft.mirrored.sort_unstable();
                    unused.retain(|block| draft.mirrored.binary_search(block).is_err());
                    self.pool.release(&unused)?;
                }
                return Ok(CopyPlan {
                    pairs: draft.pairs,
                    mirrored: draft.mirrored.len(),
                    shared: draft.shared.len(),
                });
            }
            // The mirror was evicted meanwhile: start again without it.
            self.pool.release(&claimed)?;
            self.pool.release(&draft.shared)?;
        }
    }

    /// Ends a store that every worker has reported. `true`: the request is Ready now;
    /// `false`: it is gone, because the store failed or the request was released.
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
                    self.pool.index(*block, key)?;
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
    /// [`TableError::ShortTable`], [`TableError::NotStored`].
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
            for (group, &block_tokens) in self.block_tokens.iter().enumerate() {
                let first = (from_tokens / block_tokens) as usize;
                let needed = num_tokens.div_ceil(block_tokens) as usize;
                let blocks = &device[group];
                if blocks.len() < needed {
                    let found = blocks.len();
                    return Err(TableError::ShortTable { group, needed, found });
                }
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
        self.mirror(id, State::Loading, ok)
    }

    /// Makes a Ready request Mirrored, because it was scheduled without being restored.
    ///
    /// # Errors
    /// [`TableError::UnknownRequest`], [`TableError::WrongState`] unless it is Ready.
    pub fn settle(&self, id: &str) -> Result<(), TableError> {
        self.mirror(id, State::Ready, true)
    }

    fn mirror(&self, id: &str, from: State, ok: bool) -> Result<(), TableError> {
        loop {
            let current = self.entry(id)?;
            if current.state != from {
                return Err(current.wrong_state(from.name()));
            }
            let mut partial = Vec::new();
            let next = (ok && !current.doomed).then(|| {
                let mut tables = current.tables.to_vec();
                for (table, block_tokens) in tables.iter_mut().zip(&self.block_tokens) {
                    let full = (current.num_tokens / block_tokens) as usize;
                    partial.extend(table.drain(full.min(table.len())..).filter(|&b| b != 0));
                }
                Arc::new(Entry {
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
        self.doom(id, false)
    }

    /// Forgets every request and every shared block, because the KV is no longer valid.
    ///
    /// # Errors
    /// [`TableError::Pool`] if a block was misused.
    pub fn release_all(&self) -> Result<(), TableError> {
        let ids: Vec<_> = self.entries.values().map(|entry| entry.id.clone()).collect();
        for id in ids {
            self.doom(&id, true)?;
        }
        self.pool.clear_index();
        Ok(())
    }

    fn doom(&self, id: &str, invalid: bool) -> Result<bool, TableError> {
        loop {
            let Some(current) = self.entries.get(id) else { return Ok(false) };
            let next = match current.state {
                State::Storing { .. } | State::Loading => {
                    let mut entry = current.with(current.state, true);
                    if invalid {
                        entry.keys = [].into();
                    }
                    Some(Arc::new(entry))
                }
                State::Ready | State::Mirrored => None,
            };
            if self.replace(&current, next)? {
                return Ok(!current.doomed);
            }
        }
    }

    fn check_groups(&self, found: usize) -> Result<(), TableError> {
        let expected = self.block_tokens.len();
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
            let in_mirrors: usize = mirrors.iter().map(|entry| entry.blocks().len()).sum();
            if mirrors.is_empty() || available + in_mirrors < n {
                return Err(TableError::Capacity {
                    needed: n,
                    available: available + in_mirrors,
                    capacity: self.pool.capacity(),
                });
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
}

/// A store being planned.
struct Draft {
    tables: Vec<Vec<BlockId>>,
    /// Group, position and device block of what has no host block yet.
    missing: Vec<(usize, usize, u32)>,
    mirrored: Vec<BlockId>,
    shared: Vec<BlockId>,
    pairs: Vec<BlockPair>,
}

impl Draft {
    fn new(block_tokens: &[u64], num_tokens: u64, device: &[Vec<u32>]) -> Self {
        let mut tables = Vec::with_capacity(device.len());
        let mut missing = Vec::with_capacity(device.iter().map(Vec::len).sum());
        for (group, (blocks, block_tokens)) in device.iter().zip(block_tokens).enumerate() {
            let positions = num_tokens.div_ceil(*block_tokens) as usize;
            let absent = positions.saturating_sub(blocks.len());
            tables.push(vec![0; positions]);
            let kept = (absent..positions).zip(blocks).filter(|&(_, &device)| device != 0);
            missing.extend(kept.map(|(position, &device)| (group, position, device)));
        }
        Self { tables, missing, mirrored: Vec::new(), shared: Vec::new(), pairs: Vec::new() }
    }

    /// Takes over what the request's own mirror has.
    fn take_mirrored(&mut self, mirror: Option<&Entry>, block_tokens: &[u64]) {
        let Some(mirror) = mirror else { return };
        let Self { tables, missing, mirrored, .. } = self;
        missing.retain(|&(group, position, _)| {
            // The last block may be partial now, but what the mirror has is full.
            let full = (mirror.num_tokens / block_tokens[group]) as usize;
            let host = mirror.tables[group].get(position).copied().unwrap_or(0);
            let kept = host != 0 && position < full;
            if kept {
                tables[group][position] = host;
                mirrored.push(host);
            }
            !kept
        });
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
