//! The host blocks: who owns which, without a lock.
//!
//! # How it works
//!
//! *Free blocks* are the set bits of a bitmap. A claim first takes its number from the
//! counter `free`, which makes the claim all or nothing, and then collects that many
//! bits, word by word from a rotating hint, lowest bit first. A release sets the bit
//! before it raises the counter. So there are never fewer set bits than the counter
//! and all claims under way promise, and a claim that has its number always finds its
//! bits. Runs of neighbours come out in order, which is what lets copies coalesce.
//!
//! *Owned blocks* have a reference count in their state word. Whoever takes the count
//! from one to zero marks the block `ENDING` and alone decides what becomes of it. A
//! release of many blocks takes all its references first and ends blocks only when
//! none of them failed, so a wrong id leaves everything as it was.
//!
//! *Indexed blocks* (optional) can be found by `(block hash, KV cache group)`. The
//! index is a set-associative table of `(tag, block)` words with the whole key kept
//! beside the block: a finder takes a reference first and compares the key afterwards,
//! when the block can no longer be evicted. An indexed block whose count drops to zero
//! is not free but *evictable*: it keeps its content until a claim finds too few free
//! blocks, and the one unused for longest goes first.

use crate::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};

/// The id of a host block: 1 to the pool's capacity. 0 is the null block, as in vLLM.
pub type BlockId = u32;

/// Why the pool refused; the pool is as it was before the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PoolError {
    /// Fewer blocks are available (free or evictable) than were asked for.
    #[error("{needed} blocks needed, {available} of {capacity} available")]
    Exhausted {
        /// Blocks asked for.
        needed: usize,
        /// Blocks that a claim could have had.
        available: usize,
        /// Blocks in the pool.
        capacity: usize,
    },
    /// The id is none of this pool's.
    #[error("block {id} is not in this pool, whose blocks are 1..={capacity}")]
    Foreign {
        /// The offending id.
        id: BlockId,
        /// Blocks in the pool, and the largest id.
        capacity: usize,
    },
    /// A free block was released or retained.
    #[error("block {id} (of 1..={capacity}) is free: it was released already")]
    Free {
        /// The offending id.
        id: BlockId,
        /// Blocks in the pool, and the largest id.
        capacity: usize,
    },
    /// More references were released than the block had.
    #[error("block {id} (of 1..={capacity}) has fewer references than were released")]
    OverRelease {
        /// The offending id.
        id: BlockId,
        /// Blocks in the pool, and the largest id.
        capacity: usize,
    },
    /// A block hash is longer than the index can hold.
    #[error("block hash of {len} bytes; the index holds up to {MAX_HASH_BYTES}")]
    HashTooLong {
        /// Its length in bytes.
        len: usize,
    },
}

/// The longest block hash that can be indexed, in bytes: SHA-256, vLLM's longest.
pub const MAX_HASH_BYTES: usize = 32;
const KEY_WORDS: usize = MAX_HASH_BYTES / 8 + 1;

/// What a block can be found by: the hash of its tokens and of all before them, and
/// the KV cache group it belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct BlockKey([u64; KEY_WORDS]);

impl BlockKey {
    /// The key of the block with `hash` in KV cache group `group`.
    ///
    /// # Errors
    /// [`PoolError::HashTooLong`] beyond [`MAX_HASH_BYTES`].
    pub fn new(hash: &[u8], group: u16) -> Result<Self, PoolError> {
        if hash.len() > MAX_HASH_BYTES {
            return Err(PoolError::HashTooLong { len: hash.len() });
        }
        let mut words = [0; KEY_WORDS];
        for (word, bytes) in words.iter_mut().zip(hash.chunks(8)) {
            let mut padded = [0; 8];
            padded[..bytes.len()].copy_from_slice(bytes);
            *word = u64::from_le_bytes(padded);
        }
        words[KEY_WORDS - 1] = u64::from(group) << 32 | hash.len() as u64;
        Ok(Self(words))
    }

    /// Mixes all words into one, with the finaliser of MurmurHash3 (Appleby, public domain).
    fn spread(&self) -> u64 {
        self.0.iter().fold(0, |acc, word| {
            let mut x = acc ^ word;
            x = (x ^ (x >> 33)).wrapping_mul(0xff51_afd7_ed55_8ccd);
            x = (x ^ (x >> 33)).wrapping_mul(0xc4ce_b9fe_1a85_ec53);
            x ^ (x >> 33)
        })
    }
}

// The state word of a block: flags and, below them, the reference count. 0: free.
/// The block can be found by its key.
const INDEXED: u32 = 1 << 31;
/// One thread is writing the block's key or its place in the index.
const INDEXING: u32 = 1 << 30;
/// The count has dropped to zero and one thread decides what becomes of the block.
const ENDING: u32 = 1 << 29;
const REFS: u32 = ENDING - 1;

/// A fixed number of host blocks, claimed and released by any number of threads.
pub struct BlockPool {
    capacity: usize,
    /// Bit `i % 64` of word `i / 64`: block `i + 1` is free.
    free_bits: Box<[AtomicU64]>,
    /// Free blocks that no claim under way has taken yet.
    free: AtomicUsize,
    /// The word of `free_bits` where the next claim begins.
    hint: AtomicUsize,
    states: Box<[AtomicU32]>,
    index: Option<PrefixIndex>,
}

impl BlockPool {
    /// A pool of `capacity` free blocks; with `indexed`, blocks can be found by key.
    pub fn new(capacity: u32, indexed: bool) -> Self {
        let n = capacity as usize;
        let word = |w: usize| match n - w * 64 {
            64.. => u64::MAX,
            rest => (1 << rest) - 1,
        };
        Self {
            capacity: n,
            free_bits: (0..n.div_ceil(64)).map(|w| AtomicU64::new(word(w))).collect(),
            free: AtomicUsize::new(n),
            hint: AtomicUsize::new(0),
            states: (0..n).map(|_| AtomicU32::new(0)).collect(),
            index: indexed.then(|| PrefixIndex::new(n)),
        }
    }

    /// Blocks in the pool.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Blocks that hold nothing.
    pub fn num_free(&self) -> usize {
        self.free.load(Ordering::Acquire)
    }

    /// Indexed blocks that nobody references: they go when the pool needs them.
    pub fn num_evictable(&self) -> usize {
        self.index.as_ref().map_or(0, |index| index.evictable.load(Ordering::Acquire))
    }

    /// Blocks that a claim can have: free or evictable.
    pub fn num_available(&self) -> usize {
        self.num_free() + self.num_evictable()
    }

    /// The references held on a block.
    ///
    /// # Errors
    /// [`PoolError::Foreign`].
    pub fn ref_count(&self, id: BlockId) -> Result<u32, PoolError> {
        Ok(self.state(id)?.load(Ordering::Acquire) & REFS)
    }

    /// Takes `n` blocks, each with one reference, evicting unused ones if it must.
    ///
    /// The ids come in runs of neighbours where the pool has them.
    ///
    /// # Errors
    /// [`PoolError::Exhausted`]; then no block was taken.
    pub fn claim(&self, n: usize) -> Result<Vec<BlockId>, PoolError> {
        let mut free = self.free.load(Ordering::Acquire);
        loop {
            if free >= n {
                match self.free.compare_exchange_weak(
                    free,
                    free - n,
                    Ordering::AcqRel,
                    Ordering::Acquire,
                ) {
                    Ok(_) => return Ok(self.collect(n)),
                    Err(now) => free = now,
                }
            } else if free + self.num_evictable() < n || self.evict(n - free) == 0 {
                let seen = free;
                free = self.free.load(Ordering::Acquire);
                if free <= seen {
                    return Err(PoolError::Exhausted {
                        needed: n,
                        available: free + self.num_evictable(),
                        capacity: self.capacity,
                    });
                }
            } else {
                free = self.free.load(Ordering::Acquire);
            }
        }
    }

    /// Takes `n` bits that the counter has promised to the caller.
    fn collect(&self, n: usize) -> Vec<BlockId> {
        let mut ids = Vec::with_capacity(n);
        if n == 0 {
            return ids;
        }
        let mut word = self.hint.load(Ordering::Relaxed);
        loop {
            let mut seen = self.free_bits[word].load(Ordering::Relaxed);
            while seen != 0 && ids.len() < n {
                let wanted = lowest_bits(seen, n - ids.len());
                let before = self.free_bits[word].fetch_and(!wanted, Ordering::AcqRel);
                let mut got = before & wanted;
                seen = before & !wanted;
                while got != 0 {
                    let i = word * 64 + got.trailing_zeros() as usize;
                    self.states[i].store(1, Ordering::Release);
                    ids.push(i as BlockId + 1);
                    got &= got - 1;
                }
            }
            if ids.len() == n {
                self.hint.store(word, Ordering::Relaxed);
                return ids;
            }
            word = (word + 1) % self.free_bits.len();
            #[cfg(loom)]
            loom::thread::yield_now();
        }
    }

    /// Adds one reference to each of `ids`, which the caller knows to be owned.
    ///
    /// # Errors
    /// [`PoolError::Foreign`], [`PoolError::Free`]; then no reference was added.
    pub fn retain(&self, ids: &[BlockId]) -> Result<(), PoolError> {
        for (done, &id) in ids.iter().enumerate() {
            let added = self.state(id).and_then(|state| {
                state
                    .fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| {
                        (s & REFS > 0).then(|| s + 1)
                    })
                    .map_err(|_| PoolError::Free { id, capacity: self.capacity })
            });
            if let Err(error) = added {
                self.release(&ids[..done]).expect("references taken above");
                return Err(error);
            }
        }
        Ok(())
    }

    /// Gives back one reference to each of `ids`.
    ///
    /// A block without references is free again or, if it is indexed, evictable.
    ///
    /// # Errors
    /// [`PoolError::Foreign`], [`PoolError::Free`], [`PoolError::OverRelease`]; then no
    /// reference was given back.
    pub fn release(&self, ids: &[BlockId]) -> Result<(), PoolError> {
        for &id in ids {
            self.owned(id, self.state(id)?.load(Ordering::Acquire))?;
        }
        let mut ended = Vec::new();
        for (done, &id) in ids.iter().enumerate() {
            match self.drop_reference(id) {
                Ok(true) => ended.push(id),
                Ok(false) => {}
                // More often in this list than the block has references.
                Err(error) => {
                    self.undo_release(&ids[..done], &ended);
                    return Err(error);
                }
            }
        }
        for id in ended {
            self.end(id);
        }
        Ok(())
    }

    /// Takes one reference away. If it was the last, marks the block `ENDING` and
    /// returns `true`: the block is then the caller's to end.
    fn drop_reference(&self, id: BlockId) -> Result<bool, PoolError> {
        self.states[id as usize - 1]
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| match s & REFS {
                0 => None,
                1 => Some((s - 1) | ENDING),
                _ => Some(s - 1),
            })
            .map(|before| before & REFS == 1)
            .or_else(|s| self.owned(id, s).map(|()| false))
    }

    /// Gives references back that `release` has taken, the last taken first.
    fn undo_release(&self, released: &[BlockId], ended: &[BlockId]) {
        for &id in released.iter().rev() {
            let ours = ended.contains(&id);
            // A block that another thread has ended meanwhile can't be had back.
            let _ = self.states[id as usize - 1].fetch_update(
                Ordering::AcqRel,
                Ordering::Acquire,
                |s| (s & REFS > 0 || ours && s & ENDING != 0).then_some((s & !ENDING) + 1),
            );
        }
    }

    fn owned(&self, id: BlockId, state: u32) -> Result<(), PoolError> {
        let capacity = self.capacity;
        match state {
            0 => Err(PoolError::Free { id, capacity }),
            s if s & REFS == 0 => Err(PoolError::OverRelease { id, capacity }),
            _ => Ok(()),
        }
    }

    /// Decides what becomes of a block that this thread has marked `ENDING`.
    fn end(&self, id: BlockId) {
        let state = &self.states[id as usize - 1];
        match &self.index {
            Some(index) if state.load(Ordering::Acquire) & INDEXED != 0 => {
                index.touch(id);
                // The count first: an evictor may lower it as soon as the state is seen.
                index.evictable.fetch_add(1, Ordering::AcqRel);
                state.store(INDEXED, Ordering::Release);
            }
            _ => self.free_block(id),
        }
    }

    /// Makes a block free that nobody else can reach.
    fn free_block(&self, id: BlockId) {
        let i = id as usize - 1;
        self.states[i].store(0, Ordering::Release);
        self.free_bits[i / 64].fetch_or(1 << (i % 64), Ordering::AcqRel);
        self.free.fetch_add(1, Ordering::AcqRel);
    }

    /// Lets `id`, which the caller references, be found by `key`.
    ///
    /// The content must be complete: whoever finds the block reads it. Returns `false`
    /// if the pool has no index, the block or the key is in it already, or the key's
    /// set is full (the index is a cache: it may forget, it never lies).
    ///
    /// # Errors
    /// [`PoolError::Foreign`], [`PoolError::Free`].
    pub fn index(&self, id: BlockId, key: &BlockKey) -> Result<bool, PoolError> {
        let state = self.state(id)?;
        let Some(index) = &self.index else { return Ok(false) };
        // One reference of our own: the block cannot end under our hands.
        let begun = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| {
            (s & REFS > 0 && s & (INDEXED | INDEXING) == 0).then_some((s + 1) | INDEXING)
        });
        match begun {
            Err(s) if s & REFS == 0 => {
                return Err(PoolError::Free { id, capacity: self.capacity });
            }
            Err(_) => return Ok(false),
            Ok(_) => {}
        }
        let inserted = index.insert(id, key);
        let done = if inserted { INDEXED } else { 0 };
        state
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| Some((s & !INDEXING) | done))
            .expect("the update always applies");
        self.release(&[id])?;
        Ok(inserted)
    }

    /// Finds a block by its key and adds a reference to it.
    pub fn lookup(&self, key: &BlockKey) -> Option<BlockId> {
        let index = self.index.as_ref()?;
        index.candidates(key).find(|&id| {
            let took = self.states[id as usize - 1].fetch_update(
                Ordering::AcqRel,
                Ordering::Acquire,
                |s| (s & INDEXED != 0 && s & ENDING == 0).then(|| s + 1),
            );
            let Ok(before) = took else { return false };
            if before & REFS == 0 {
                index.evictable.fetch_sub(1, Ordering::AcqRel);
            }
            // Referenced, so neither evicted nor given another key from here on.
            let found = index.key(id) == *key;
            if !found {
                self.release(&[id]).expect("reference taken above");
            }
            found
        })
    }

    /// Frees up to `n` evictable blocks, the longest unused first; returns how many.
    pub fn evict(&self, n: usize) -> usize {
        let Some(index) = &self.index else { return 0 };
        let mut oldest: Vec<(u64, BlockId)> = (1..=self.capacity as BlockId)
            .filter(|&id| self.states[id as usize - 1].load(Ordering::Acquire) == INDEXED)
            .map(|id| (index.stamp(id), id))
            .collect();
        if n < oldest.len() {
            oldest.select_nth_unstable(n);
            oldest.truncate(n);
        }
        let evicted = oldest.iter().filter(|&&(_, id)| {
            let state = &self.states[id as usize - 1];
            let won = state
                .compare_exchange(INDEXED, ENDING, Ordering::AcqRel, Ordering::Acquire)
                .is_ok();
            if won {
                index.evictable.fetch_sub(1, Ordering::AcqRel);
                index.remove(id);
                self.free_block(id);
            }
            won
        });
        evicted.count()
    }

    /// Forgets every key: evictable blocks become free, owned ones can't be found any more.
    pub fn clear_index(&self) {
        self.evict(self.capacity);
        let Some(index) = &self.index else { return };
        for id in 1..=self.capacity as BlockId {
            let state = &self.states[id as usize - 1];
            let taken = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| {
                (s & INDEXED != 0 && s & REFS > 0 && s & INDEXING == 0)
                    .then_some(((s & !INDEXED) | INDEXING) + 1)
            });
            if taken.is_ok() {
                index.remove(id);
                state.fetch_and(!INDEXING, Ordering::AcqRel);
                self.release(&[id]).expect("reference taken above");
            }
        }
    }

    fn state(&self, id: BlockId) -> Result<&AtomicU32, PoolError> {
        (id as usize)
            .checked_sub(1)
            .and_then(|i| self.states.get(i))
            .ok_or(PoolError::Foreign { id, capacity: self.capacity })
    }
}

/// The lowest `n` set bits of `word`.
fn lowest_bits(word: u64, n: usize) -> u64 {
    if word.count_ones() as usize <= n {
        return word;
    }
    let mut rest = word;
    for _ in 0..n {
        rest &= rest - 1;
    }
    word & !rest
}

/// `(key) -> block`: a set-associative table, and the keys beside the blocks.
struct PrefixIndex {
    /// `tag << 32 | block`, 0 where empty; set `s` is `WAYS` words from `s * WAYS` on.
    slots: Box<[AtomicU64]>,
    entries: Box<[IndexEntry]>,
    evictable: AtomicUsize,
    clock: AtomicU64,
}

struct IndexEntry {
    key: [AtomicU64; KEY_WORDS],
    /// The block's place in `slots`.
    slot: AtomicUsize,
    /// When the block was last unreferenced, by the index's clock.
    stamp: AtomicU64,
}

/// Slots that a key may be in. With four slots per block on average, a full set is a
/// matter of one key in a million.
const WAYS: usize = 16;

impl PrefixIndex {
    fn new(capacity: usize) -> Self {
        let num_slots = (capacity * 4).next_power_of_two().max(WAYS);
        let entry = || IndexEntry {
            key: std::array::from_fn(|_| AtomicU64::new(0)),
            slot: AtomicUsize::new(0),
            stamp: AtomicU64::new(0),
        };
        Self {
            slots: (0..num_slots).map(|_| AtomicU64::new(0)).collect(),
            entries: (0..capacity).map(|_| entry()).collect(),
            evictable: AtomicUsize::new(0),
            clock: AtomicU64::new(0),
        }
    }

    /// The places where `key` may be, and its tag.
    fn set(&self, key: &BlockKey) -> (std::ops::Range<usize>, u64) {
        let spread = key.spread();
        let start = spread as usize % (self.slots.len() / WAYS) * WAYS;
        (start..start + WAYS, spread >> 32 << 32)
    }

    /// Blocks whose key has the tag of `key`: mostly one or none.
    fn candidates(&self, key: &BlockKey) -> impl Iterator<Item = BlockId> + '_ {
        let (set, tag) = self.set(key);
        self.slots[set].iter().filter_map(move |slot| {
            let word = slot.load(Ordering::Acquire);
            let id = word as BlockId;
            (id != 0 && word & !u64::from(u32::MAX) == tag).then_some(id)
        })
    }

    /// Puts the key of a block, which the caller alone may index, into the table.
    fn insert(&self, id: BlockId, key: &BlockKey) -> bool {
        if self.candidates(key).any(|other| self.key(other) == *key) {
            return false;
        }
        let entry = &self.entries[id as usize - 1];
        for (word, value) in entry.key.iter().zip(key.0) {
            word.store(value, Ordering::Relaxed);
        }
        let (set, tag) = self.set(key);
        let place = set.into_iter().find(|&place| {
            let slot = &self.slots[place];
            slot.load(Ordering::Relaxed) == 0
                && slot
                    .compare_exchange(0, tag | u64::from(id), Ordering::AcqRel, Ordering::Relaxed)
                    .is_ok()
        });
        place.inspect(|&place| entry.slot.store(place, Ordering::Relaxed)).is_some()
    }

    /// Takes a block out of the table, which the caller alone may do.
    fn remove(&self, id: BlockId) {
        let place = self.entries[id as usize - 1].slot.load(Ordering::Relaxed);
        self.slots[place].store(0, Ordering::Release);
    }

    fn key(&self, id: BlockId) -> BlockKey {
        let words = &self.entries[id as usize - 1].key;
        BlockKey(std::array::from_fn(|i| words[i].load(Ordering::Relaxed)))
    }

    fn touch(&self, id: BlockId) {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        self.entries[id as usize - 1].stamp.store(now, Ordering::Relaxed);
    }

    fn stamp(&self, id: BlockId) -> u64 {
        self.entries[id as usize - 1].stamp.load(Ordering::Relaxed)
    }
}
