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
//! release of many blocks checks all of them before it changes any, so a wrong id
//! leaves everything as it was.
//!
//! *Indexed blocks* (optional) can be found by `(block hash, KV cache group)`. The
//! index is a set-associative table of `(tag, block)` words with the whole key kept
//! beside the block: a finder takes a reference first and compares the key afterwards,
//! when the block can no longer be evicted. A block is indexed at most once between
//! two claims of it, so a key that a finder reads never changes under its eyes. An
//! indexed block whose count drops to zero is not free but *evictable*: it keeps its
//! content until a claim finds too few free blocks, and the one unused for longest
//! goes first. Keys belong to a *generation*; clearing the index begins a new one, in
//! which no older key is found.

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
    /// The ids come in runs of neighbours where the pool has them. A block that another
    /// thread is moving at this moment (releasing, evicting, looking up) may count as taken.
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
                continue;
            }
            let most = free + self.num_evictable();
            let evicted = if most < n { 0 } else { self.evict(n - free) };
            let now = self.free.load(Ordering::Acquire);
            if evicted == 0 && now <= free {
                // Where enough were evictable, others were faster and left what is free.
                let available = if most < n { most } else { now };
                return Err(PoolError::Exhausted { needed: n, available, capacity: self.capacity });
            }
            free = now;
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
            // What another thread took here, it left elsewhere: so see what it has done.
            let mut seen = self.free_bits[word].load(Ordering::Acquire);
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
                self.release(&ids[..done])?;
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
    /// reference was given back. (If two threads give back the same reference at once,
    /// the slower one has an error too, and its other references are given back.)
    pub fn release(&self, ids: &[BlockId]) -> Result<(), PoolError> {
        let mut sorted = ids.to_vec();
        sorted.sort_unstable();
        for same in sorted.chunk_by(|a, b| a == b) {
            let state = self.state(same[0])?.load(Ordering::Acquire);
            self.check_refs(same[0], state, same.len())?;
        }
        let mut result = Ok(());
        let mut unused = Vec::with_capacity(ids.len());
        for &id in ids {
            match self.drop_reference(id) {
                Ok(last) => unused.extend(last.then_some(id)),
                Err(error) => result = result.and(Err(error)),
            }
        }
        self.free_blocks(&unused);
        result
    }

    /// Gives back a reference that this thread holds.
    fn release_one(&self, id: BlockId) -> Result<(), PoolError> {
        if self.drop_reference(id)? {
            self.free_blocks(&[id]);
        }
        Ok(())
    }

    /// Takes one reference away from a block of this pool. `true` if nobody has the block
    /// any more: it is then the caller's to free.
    fn drop_reference(&self, id: BlockId) -> Result<bool, PoolError> {
        let state = &self.states[id as usize - 1];
        let dropped = state.fetch_update(Ordering::AcqRel, Ordering::Acquire, |s| match s & REFS {
            0 => None,
            1 => Some((s - 1) | ENDING),
            _ => Some(s - 1),
        });
        match dropped {
            Ok(before) => Ok(before & REFS == 1 && !self.keep(id)),
            Err(state) => self.check_refs(id, state, 1).map(|()| false),
        }
    }

    /// Whether a block with this state word has `needed` references, one or more.
    fn check_refs(&self, id: BlockId, state: u32, needed: usize) -> Result<(), PoolError> {
        let capacity = self.capacity;
        match state {
            0 => Err(PoolError::Free { id, capacity }),
            s if ((s & REFS) as usize) < needed => Err(PoolError::OverRelease { id, capacity }),
            _ => Ok(()),
        }
    }

    /// Makes a block that this thread has marked `ENDING` evictable, if it can be found.
    fn keep(&self, id: BlockId) -> bool {
        let state = &self.states[id as usize - 1];
        let Some(index) = &self.index else { return false };
        if state.load(Ordering::Acquire) & INDEXED == 0 {
            return false;
        }
        if !index.is_current(id) {
            index.remove(id);
            return false;
        }
        index.touch(id);
        // The count first: an evictor may lower it as soon as the state is seen.
        index.evictable.fetch_add(1, Ordering::AcqRel);
        state.store(INDEXED, Ordering::Release);
        true
    }

    /// Makes blocks free that nobody else can reach.
    fn free_blocks(&self, ids: &[BlockId]) {
        for &id in ids {
            self.states[id as usize - 1].store(0, Ordering::Release);
        }
        let word = |id: BlockId| (id as usize - 1) / 64;
        for neighbours in ids.chunk_by(|&a, &b| word(a) == word(b)) {
            let bits = neighbours.iter().fold(0, |bits, id| bits | 1 << ((id - 1) % 64));
            self.free_bits[word(neighbours[0])].fetch_or(bits, Ordering::AcqRel);
        }
        self.free.fetch_add(ids.len(), Ordering::AcqRel);
    }

    /// Lets `id`, which the caller references, be found by `key`.
    ///
    /// The content must be complete: whoever finds the block reads it. Returns `false`
    /// if the pool has no index, the block was indexed since it was claimed, the key is in
    /// the index already, or the key's set is full (it may forget, it never lies).
    ///
    /// # Errors
    /// [`PoolError::Foreign`], [`PoolError::Free`].
    pub fn index(&self, id: BlockId, key: &BlockKey) -> Result<bool, PoolError> {
        self.index_since(self.generation(), id, key)
    }

    /// Like [`BlockPool::index`], for content that is as old as `generation`: it can't
    /// be found if the index was cleared since then, not even if it is being cleared now.
    ///
    /// # Errors
    /// Those of [`BlockPool::index`].
    pub fn index_since(
        &self,
        generation: u64,
        id: BlockId,
        key: &BlockKey,
    ) -> Result<bool, PoolError> {
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
        let inserted = index.insert(generation, id, key);
        let done = if inserted { INDEXING | INDEXED } else { INDEXING };
        state.fetch_xor(done, Ordering::AcqRel);
        self.release_one(id)?;
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
            let found = index.holds(id, key);
            if !found {
                // Fails only if another thread gave back more references than it had.
                let _ = self.release_one(id);
            }
            found
        })
    }

    /// Frees up to `n` evictable blocks, the longest unused first; returns how many.
    pub fn evict(&self, n: usize) -> usize {
        let Some(index) = &self.index else { return 0 };
        let mut evicted = 0;
        loop {
            let mut oldest: Vec<(u64, BlockId)> = (1..=self.capacity as BlockId)
                .filter(|&id| self.states[id as usize - 1].load(Ordering::Acquire) == INDEXED)
                .map(|id| (index.stamp(id), id))
                .collect();
            let wanted = n - evicted;
            if wanted < oldest.len() {
                oldest.select_nth_unstable(wanted);
                oldest.truncate(wanted);
            }
            let mut taken: Vec<BlockId> = oldest.iter().map(|&(_, id)| id).collect();
            taken.retain(|&id| {
                self.states[id as usize - 1]
                    .compare_exchange(INDEXED, ENDING, Ordering::AcqRel, Ordering::Acquire)
                    .is_ok()
            });
            index.evictable.fetch_sub(taken.len(), Ordering::AcqRel);
            taken.iter().for_each(|&id| index.remove(id));
            self.free_blocks(&taken);
            evicted += taken.len();
            // Where another thread was faster, the next oldest take the place.
            if taken.len() == oldest.len() {
                return evicted;
            }
        }
    }

    /// Forgets every key: evictable blocks become free, and owned ones can't be found any
    /// more and become free when they are released.
    pub fn clear_index(&self) {
        let Some(index) = &self.index else { return };
        index.generation.fetch_add(1, Ordering::AcqRel);
        self.evict(self.capacity);
    }

    /// How often the index was cleared.
    pub fn generation(&self) -> u64 {
        self.index.as_ref().map_or(0, |index| index.generation.load(Ordering::Acquire))
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
    generation: AtomicU64,
}

struct IndexEntry {
    key: [AtomicU64; KEY_WORDS],
    /// The generation that the key belongs to.
    generation: AtomicU64,
    /// The block's place in `slots`.
    slot: AtomicUsize,
    /// When the block was last unreferenced, by the index's clock.
    stamp: AtomicU64,
}

/// Slots that a key may be in. With four slots per block on average, a full set is a
/// matter of one key in a million.
const WAYS: usize = if cfg!(loom) { 2 } else { 16 };

impl PrefixIndex {
    fn new(capacity: usize) -> Self {
        let num_slots = (capacity * 4).next_power_of_two().max(WAYS);
        let entry = || IndexEntry {
            key: std::array::from_fn(|_| AtomicU64::new(0)),
            generation: AtomicU64::new(0),
            slot: AtomicUsize::new(0),
            stamp: AtomicU64::new(0),
        };
        Self {
            slots: (0..num_slots).map(|_| AtomicU64::new(0)).collect(),
            entries: (0..capacity).map(|_| entry()).collect(),
            evictable: AtomicUsize::new(0),
            clock: AtomicU64::new(0),
            generation: AtomicU64::new(0),
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
    fn insert(&self, generation: u64, id: BlockId, key: &BlockKey) -> bool {
        let outdated = generation != self.generation.load(Ordering::Acquire);
        if outdated || self.candidates(key).any(|other| self.holds(other, key)) {
            return false;
        }
        let entry = &self.entries[id as usize - 1];
        entry.generation.store(generation, Ordering::Relaxed);
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

    /// Whether `key` is the block's key and can still be found.
    fn holds(&self, id: BlockId, key: &BlockKey) -> bool {
        let words = self.entries[id as usize - 1].key.iter();
        self.is_current(id)
            && words.zip(key.0).all(|(word, value)| word.load(Ordering::Relaxed) == value)
    }

    /// Whether the block's key is of this generation.
    fn is_current(&self, id: BlockId) -> bool {
        let generation = self.entries[id as usize - 1].generation.load(Ordering::Relaxed);
        generation == self.generation.load(Ordering::Acquire)
    }

    fn touch(&self, id: BlockId) {
        let now = self.clock.fetch_add(1, Ordering::Relaxed);
        self.entries[id as usize - 1].stamp.store(now, Ordering::Relaxed);
    }

    fn stamp(&self, id: BlockId) -> u64 {
        self.entries[id as usize - 1].stamp.load(Ordering::Relaxed)
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    fn key(n: u32) -> BlockKey {
        BlockKey::new(&n.to_le_bytes(), 0).unwrap()
    }

    /// A pool with an index whose blocks are all evictable under the key of their id,
    /// released in the order of `ids`.
    fn evictable(ids: &[BlockId]) -> BlockPool {
        let pool = BlockPool::new(ids.len() as u32, true);
        for id in pool.claim(ids.len()).unwrap() {
            assert_eq!(pool.index(id, &key(id)), Ok(true));
        }
        for &id in ids {
            pool.release(&[id]).unwrap();
        }
        pool
    }

    /// Everything that an error must leave as it was.
    fn snapshot(pool: &BlockPool) -> (usize, usize, Vec<u32>) {
        let refs = (1..=pool.capacity() as BlockId).map(|id| pool.ref_count(id).unwrap());
        (pool.num_free(), pool.num_evictable(), refs.collect())
    }

    #[test]
    fn every_block_of_a_new_pool_is_free_and_has_its_own_id() {
        for capacity in [0, 1, 63, 64, 65, 128, 130] {
            let pool = BlockPool::new(capacity, true);
            assert_eq!(snapshot(&pool), (capacity as usize, 0, vec![0; capacity as usize]));
            assert_eq!(pool.num_available(), pool.capacity());
            let ids = pool.claim(capacity as usize).unwrap();
            assert_eq!(ids, (1..=capacity).collect::<Vec<_>>());
            assert_eq!(snapshot(&pool), (0, 0, vec![1; capacity as usize]));
        }
    }

    #[test]
    fn claims_are_all_or_nothing() {
        let pool = BlockPool::new(10, false);
        let ids = pool.claim(7).unwrap();
        let before = snapshot(&pool);
        let error = pool.claim(4).unwrap_err();
        assert_eq!(error, PoolError::Exhausted { needed: 4, available: 3, capacity: 10 });
        assert_eq!(error.to_string(), "4 blocks needed, 3 of 10 available");
        assert_eq!(snapshot(&pool), before);
        assert_eq!(pool.claim(0), Ok(vec![]));
        assert_eq!(pool.claim(3), Ok(vec![8, 9, 10]));
        assert!(pool.claim(usize::MAX).is_err());
        pool.release(&ids).unwrap();
        assert_eq!(pool.num_free(), 7);
    }

    #[test]
    fn a_claim_gets_runs_of_neighbours_around_what_is_taken() {
        let pool = BlockPool::new(200, false);
        assert_eq!(pool.claim(100), Ok((1..=100).collect()));
        assert_eq!(pool.claim(100), Ok((101..=200).collect()));
        pool.release(&(150..=160).rev().collect::<Vec<_>>()).unwrap();
        pool.release(&[7, 8, 9]).unwrap();
        assert_eq!(pool.claim(14), Ok((7..=9).chain(150..=160).collect()));
    }

    #[test]
    fn the_next_claim_goes_on_where_the_last_one_ended() {
        let pool = BlockPool::new(192, false);
        assert_eq!(pool.claim(70), Ok((1..=70).collect()));
        pool.release(&(1..=10).collect::<Vec<_>>()).unwrap();
        assert_eq!(pool.claim(10), Ok((71..=80).collect()));
        assert_eq!(pool.claim(122), Ok((81..=192).chain(1..=10).collect()));
    }

    #[test]
    fn a_block_is_free_when_its_last_reference_is_given_back() {
        let pool = BlockPool::new(4, false);
        let ids = pool.claim(2).unwrap();
        pool.retain(&ids).unwrap();
        pool.retain(&ids[..1]).unwrap();
        assert_eq!(snapshot(&pool), (2, 0, vec![3, 2, 0, 0]));
        pool.release(&[1, 2, 1]).unwrap();
        assert_eq!(snapshot(&pool), (2, 0, vec![1, 1, 0, 0]));
        pool.release(&[2]).unwrap();
        assert_eq!(snapshot(&pool), (3, 0, vec![1, 0, 0, 0]));
        pool.release(&[1]).unwrap();
        assert_eq!(snapshot(&pool), (4, 0, vec![0; 4]));
    }

    #[test]
    fn wrong_releases_are_errors_and_change_nothing() {
        let pool = BlockPool::new(5, true);
        pool.claim(4).unwrap();
        pool.retain(&[2]).unwrap();
        pool.index(3, &key(3)).unwrap();
        pool.release(&[3]).unwrap();
        // Now 1 has one reference, 2 has two, 3 is evictable, 4 has one, 5 is free.
        let before = snapshot(&pool);
        assert_eq!(before, (1, 1, vec![1, 2, 0, 1, 0]));
        let foreign = |id| PoolError::Foreign { id, capacity: 5 };
        let over = |id| PoolError::OverRelease { id, capacity: 5 };
        let wrong = [
            (vec![0], foreign(0)),
            (vec![1, 2, 0], foreign(0)),
            (vec![1, 6, 2], foreign(6)),
            (vec![u32::MAX], foreign(u32::MAX)),
            (vec![1, 5], PoolError::Free { id: 5, capacity: 5 }),
            (vec![1, 3], over(3)),
            (vec![1, 1], over(1)),
            (vec![2, 1, 2, 4, 2], over(2)),
        ];
        for (ids, error) in wrong {
            assert_eq!(pool.release(&ids), Err(error), "{ids:?}");
            assert_eq!(snapshot(&pool), before, "{ids:?}");
        }
        pool.release(&[4, 2, 1, 2]).unwrap();
        assert_eq!(snapshot(&pool), (4, 1, vec![0; 5]));
        assert_eq!(pool.release(&[1]), Err(PoolError::Free { id: 1, capacity: 5 }));
    }

    #[test]
    fn wrong_retains_are_errors_and_change_nothing() {
        let pool = BlockPool::new(3, true);
        pool.claim(2).unwrap();
        pool.index(2, &key(2)).unwrap();
        pool.release(&[2]).unwrap();
        let before = snapshot(&pool);
        for (id, error) in [
            (0, PoolError::Foreign { id: 0, capacity: 3 }),
            (4, PoolError::Foreign { id: 4, capacity: 3 }),
            (3, PoolError::Free { id: 3, capacity: 3 }),
            (2, PoolError::Free { id: 2, capacity: 3 }),
        ] {
            assert_eq!(pool.retain(&[1, 1, id, 1]), Err(error));
            assert_eq!(snapshot(&pool), before);
        }
    }

    #[test]
    fn other_calls_refuse_foreign_and_free_blocks() {
        let pool = BlockPool::new(3, true);
        let foreign = |id| PoolError::Foreign { id, capacity: 3 };
        for id in [0, 4] {
            assert_eq!(pool.ref_count(id), Err(foreign(id)));
            assert_eq!(pool.index(id, &key(1)), Err(foreign(id)));
        }
        assert_eq!(pool.index(1, &key(1)), Err(PoolError::Free { id: 1, capacity: 3 }));
    }

    #[test]
    fn errors_name_the_block_and_the_bound() {
        let (id, capacity) = (9, 5);
        let texts = [
            (
                PoolError::Foreign { id, capacity },
                "block 9 is not in this pool, whose blocks are 1..=5",
            ),
            (
                PoolError::Free { id, capacity },
                "block 9 (of 1..=5) is free: it was released already",
            ),
            (
                PoolError::OverRelease { id, capacity },
                "block 9 (of 1..=5) has fewer references than were released",
            ),
            (
                PoolError::HashTooLong { len: 33 },
                "block hash of 33 bytes; the index holds up to 32",
            ),
        ];
        for (error, text) in texts {
            assert_eq!(error.to_string(), text);
        }
    }

    #[test]
    fn keys_differ_by_hash_length_and_group() {
        let keys = [
            BlockKey::new(b"", 0),
            BlockKey::new(b"", 1),
            BlockKey::new(b"\0", 0),
            BlockKey::new(b"\0\0", 0),
            BlockKey::new(&[0; 32], 0),
            BlockKey::new(&[0; 32], u16::MAX),
            BlockKey::new(b"12345678", 0),
            BlockKey::new(b"123456789", 0),
        ]
        .map(Result::unwrap);
        let pool = BlockPool::new(keys.len() as u32, true);
        for (id, key) in pool.claim(keys.len()).unwrap().iter().zip(&keys) {
            assert_eq!(pool.lookup(key), None);
            assert_eq!(pool.index(*id, key), Ok(true));
        }
        for (i, key) in keys.iter().enumerate() {
            assert_eq!(pool.lookup(key), Some(i as BlockId + 1));
        }
        assert_eq!(BlockKey::new(&[0; 33], 0), Err(PoolError::HashTooLong { len: 33 }));
    }

    #[test]
    fn a_found_block_has_one_more_reference() {
        let pool = BlockPool::new(2, true);
        let id = pool.claim(1).unwrap()[0];
        assert_eq!(pool.index(id, &key(7)), Ok(true));
        assert_eq!(pool.ref_count(id), Ok(1));
        assert_eq!(pool.lookup(&key(7)), Some(id));
        assert_eq!(pool.lookup(&key(8)), None);
        assert_eq!(pool.ref_count(id), Ok(2));
        pool.release(&[id, id]).unwrap();
        assert_eq!((pool.num_free(), pool.num_evictable(), pool.num_available()), (1, 1, 2));
        assert_eq!(pool.lookup(&key(7)), Some(id));
        assert_eq!((pool.num_free(), pool.num_evictable(), pool.num_available()), (1, 0, 1));
        pool.release(&[id]).unwrap();
        assert_eq!(pool.num_evictable(), 1);
    }

    #[test]
    fn a_block_has_one_key_and_a_key_one_block() {
        let pool = BlockPool::new(3, true);
        pool.claim(2).unwrap();
        assert_eq!(pool.index(1, &key(1)), Ok(true));
        assert_eq!(pool.index(1, &key(1)), Ok(false));
        assert_eq!(pool.index(1, &key(2)), Ok(false));
        assert_eq!(pool.index(2, &key(1)), Ok(false));
        assert_eq!(pool.lookup(&key(2)), None);
        assert_eq!(pool.index(2, &key(2)), Ok(true));
        pool.release(&[1, 2]).unwrap();
        assert_eq!((pool.lookup(&key(1)), pool.lookup(&key(2))), (Some(1), Some(2)));
    }

    #[test]
    fn a_block_claimed_again_has_no_key() {
        let pool = evictable(&[1]);
        assert_eq!(pool.claim(1), Ok(vec![1]));
        assert_eq!(pool.lookup(&key(1)), None);
        assert_eq!(pool.index(1, &key(5)), Ok(true));
        assert_eq!(pool.lookup(&key(5)), Some(1));
    }

    #[test]
    fn the_longest_unused_is_evicted_first() {
        let order = [3, 5, 1, 4, 2];
        let pool = evictable(&order);
        // 5 is used once more and goes last.
        assert_eq!(pool.lookup(&key(5)), Some(5));
        pool.release(&[5]).unwrap();
        for (evicted, id) in [3, 1, 4, 2, 5].into_iter().enumerate() {
            assert_eq!(pool.num_evictable(), 5 - evicted);
            assert_eq!(pool.claim(1), Ok(vec![id]));
            assert_eq!(pool.lookup(&key(id)), None);
        }
        assert!(pool.claim(1).is_err());
    }

    #[test]
    fn a_claim_evicts_no_more_than_it_needs_and_nothing_in_vain() {
        let pool = evictable(&[4, 3, 2, 1]);
        assert_eq!(pool.claim(2), Ok(vec![3, 4]));
        let before = snapshot(&pool);
        assert_eq!(before, (0, 2, vec![0, 0, 1, 1]));
        let error = PoolError::Exhausted { needed: 3, available: 2, capacity: 4 };
        assert_eq!(pool.claim(3), Err(error));
        assert_eq!(snapshot(&pool), before);
        assert_eq!((pool.lookup(&key(1)), pool.lookup(&key(2))), (Some(1), Some(2)));
    }

    #[test]
    fn evicting_frees_the_oldest_that_nobody_uses() {
        let pool = evictable(&[2, 1, 3]);
        assert_eq!(pool.lookup(&key(2)), Some(2));
        assert_eq!(pool.evict(0), 0);
        assert_eq!(pool.evict(1), 1);
        assert_eq!(pool.lookup(&key(1)), None);
        assert_eq!(pool.evict(9), 1);
        assert_eq!(pool.evict(9), 0);
        assert_eq!(snapshot(&pool), (2, 0, vec![0, 1, 0]));
    }

    #[test]
    fn a_cleared_index_forgets_every_key_but_takes_no_reference() {
        let pool = evictable(&[1, 2, 3, 4]);
        pool.lookup(&key(2)).unwrap();
        pool.clear_index();
        assert_eq!(snapshot(&pool), (3, 0, vec![0, 1, 0, 0]));
        for id in 1..=4 {
            assert_eq!(pool.lookup(&key(id)), None);
        }
        // What was in it is not indexed again, but its key is free for new content.
        assert_eq!(pool.index(2, &key(2)), Ok(false));
        assert_eq!(pool.claim(1), Ok(vec![1]));
        assert_eq!(pool.index(1, &key(2)), Ok(true));
        assert_eq!(pool.lookup(&key(2)), Some(1));
        pool.release(&[2, 1, 1]).unwrap();
        assert_eq!((pool.num_free(), pool.num_evictable()), (3, 1));
    }

    #[test]
    fn content_from_before_the_index_was_cleared_is_not_indexed_after() {
        let pool = BlockPool::new(1, true);
        let generation = pool.generation();
        pool.claim(1).unwrap();
        pool.clear_index();
        assert_eq!(pool.index_since(generation, 1, &key(1)), Ok(false));
        assert_eq!(pool.lookup(&key(1)), None);
        pool.release(&[1]).unwrap();
        assert_eq!(pool.num_free(), 1);
    }

    #[test]
    fn a_full_set_of_the_index_forgets_but_does_not_lie() {
        let pool = BlockPool::new(1000, true);
        let index = pool.index.as_ref().unwrap();
        let first = index.set(&key(0)).0;
        let same_set: Vec<_> =
            (0..).map(key).filter(|key| index.set(key).0 == first).take(WAYS + 2).collect();
        let ids = pool.claim(WAYS + 2).unwrap();
        let indexed = |(&id, key)| pool.index(id, key).unwrap();
        let done: Vec<_> = ids.iter().zip(&same_set).map(indexed).collect();
        assert_eq!(done, [vec![true; WAYS], vec![false; 2]].concat());
        for (i, key) in same_set.iter().enumerate() {
            assert_eq!(pool.lookup(key), (i < WAYS).then(|| ids[i]));
        }
        pool.release(&ids).unwrap();
        assert_eq!(pool.num_free(), 1000 - WAYS);
        // The slot of an evicted block serves the next key.
        pool.release(&ids[3..4]).unwrap();
        assert_eq!(pool.evict(1), 1);
        let id = pool.claim(1).unwrap()[0];
        assert_eq!(pool.index(id, &same_set[WAYS]), Ok(true));
        assert_eq!(pool.lookup(&same_set[WAYS]), Some(id));
    }

    #[test]
    fn keys_that_look_alike_in_the_table_are_told_apart() {
        // Of so many keys, a few have the 32 bits in common that the table holds.
        let pool = BlockPool::new(2, true);
        let mut by_tag = std::collections::HashMap::new();
        let tag = |n| pool.index.as_ref().unwrap().set(&key(n)).1;
        let twin = |n| by_tag.insert(tag(n), n).map(|other| (other, n));
        let (a, b) = (0..1_000_000).find_map(twin).unwrap();
        pool.claim(2).unwrap();
        assert_eq!(pool.index(1, &key(a)), Ok(true));
        assert_eq!(pool.lookup(&key(b)), None);
        assert_eq!(pool.ref_count(1), Ok(1));
        assert_eq!(pool.index(2, &key(b)), Ok(true));
        assert_eq!((pool.lookup(&key(a)), pool.lookup(&key(b))), (Some(1), Some(2)));
    }

    #[test]
    fn a_pool_without_index_finds_nothing() {
        let pool = BlockPool::new(2, false);
        let ids = pool.claim(1).unwrap();
        assert_eq!(pool.index(ids[0], &key(1)), Ok(false));
        assert_eq!(pool.lookup(&key(1)), None);
        pool.clear_index();
        pool.release(&ids).unwrap();
        assert_eq!((pool.num_free(), pool.num_evictable(), pool.evict(2)), (2, 0, 0));
    }

    #[test]
    fn the_lowest_bits_of_a_word() {
        assert_eq!(lowest_bits(0b1011_0100, 2), 0b0001_0100);
        assert_eq!(lowest_bits(0b1011_0100, 4), 0b1011_0100);
        assert_eq!(lowest_bits(u64::MAX, 63), u64::MAX >> 1);
        assert_eq!(lowest_bits(u64::MAX, 64), u64::MAX);
        assert_eq!(lowest_bits(u64::MAX, 1), 1);
    }
}
