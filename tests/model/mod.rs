//! What the block pool is meant to do, written down as simply as possible.

use std::collections::{BTreeMap, BTreeSet};

use preempt_offload::block_pool::{BlockId, BlockKey, BlockPool, PoolError};

/// A block's hash and group; `[u8; 1]` hashes are enough to tell keys apart.
pub type Key = (u8, u16);

pub fn key((hash, group): Key) -> BlockKey {
    BlockKey::new(&[hash], group).unwrap()
}

#[derive(Debug, Clone)]
struct Block {
    refs: u32,
    /// The key and its generation; a block has one at most, from claim to free.
    key: Option<(Key, u64)>,
    /// When the last reference was given back.
    unused_since: u64,
}

/// A pool whose free blocks are a set and whose other blocks are a map.
#[derive(Debug, Clone)]
pub struct PoolModel {
    capacity: u32,
    indexed: bool,
    free: BTreeSet<BlockId>,
    blocks: BTreeMap<BlockId, Block>,
    /// The 64 blocks where the next claim begins.
    hint: u32,
    generation: u64,
    clock: u64,
}

impl PoolModel {
    pub fn new(capacity: u32, indexed: bool) -> Self {
        Self {
            capacity,
            indexed,
            free: (1..=capacity).collect(),
            blocks: BTreeMap::new(),
            hint: 0,
            generation: 0,
            clock: 0,
        }
    }

    pub fn generation(&self) -> u64 {
        self.generation
    }

    pub fn ref_count(&self, id: BlockId) -> Result<u32, PoolError> {
        self.check(id)?;
        Ok(self.blocks.get(&id).map_or(0, |block| block.refs))
    }

    /// Evictable blocks, the next to go first.
    fn evictable(&self) -> Vec<BlockId> {
        let unused = self.blocks.iter().filter(|(_, block)| block.refs == 0);
        let mut ids: Vec<_> = unused.map(|(&id, block)| (block.unused_since, id)).collect();
        ids.sort_unstable();
        ids.into_iter().map(|(_, id)| id).collect()
    }

    pub fn num_available(&self) -> usize {
        self.free.len() + self.evictable().len()
    }

    pub fn claim(&mut self, n: usize) -> Result<Vec<BlockId>, PoolError> {
        let available = self.num_available();
        if available < n {
            let capacity = self.capacity as usize;
            return Err(PoolError::Exhausted { needed: n, available, capacity });
        }
        self.evict(n.saturating_sub(self.free.len()));
        let words = self.capacity.div_ceil(64);
        let word = |id: BlockId| (id - 1) / 64;
        let mut ids: Vec<_> = self.free.iter().copied().collect();
        ids.sort_by_key(|&id| ((word(id) + words - self.hint) % words, id));
        ids.truncate(n);
        for &id in &ids {
            self.hint = word(id);
            self.free.remove(&id);
            self.blocks.insert(id, Block { refs: 1, key: None, unused_since: 0 });
        }
        Ok(ids)
    }

    pub fn retain(&mut self, ids: &[BlockId]) -> Result<(), PoolError> {
        for &id in ids {
            if self.ref_count(id)? == 0 {
                return Err(PoolError::Free { id, capacity: self.capacity as usize });
            }
        }
        for id in ids {
            self.blocks.get_mut(id).unwrap().refs += 1;
        }
        Ok(())
    }

    pub fn release(&mut self, ids: &[BlockId]) -> Result<(), PoolError> {
        let capacity = self.capacity as usize;
        let distinct: BTreeSet<_> = ids.iter().copied().collect();
        for id in distinct {
            self.check(id)?;
            let Some(block) = self.blocks.get(&id) else {
                return Err(PoolError::Free { id, capacity });
            };
            if (block.refs as usize) < ids.iter().filter(|&&other| other == id).count() {
                return Err(PoolError::OverRelease { id, capacity });
            }
        }
        for id in ids {
            let block = self.blocks.get_mut(id).unwrap();
            block.refs -= 1;
            if block.refs > 0 {
                continue;
            }
            if block.key.is_some_and(|(_, generation)| generation == self.generation) {
                block.unused_since = self.clock;
                self.clock += 1;
            } else {
                self.blocks.remove(id);
                self.free.insert(*id);
            }
        }
        Ok(())
    }

    fn find(&self, key: Key) -> Option<BlockId> {
        let wanted = Some((key, self.generation));
        self.blocks.iter().find(|(_, block)| block.key == wanted).map(|(&id, _)| id)
    }

    pub fn index_since(
        &mut self,
        generation: u64,
        id: BlockId,
        key: Key,
    ) -> Result<bool, PoolError> {
        let refs = self.ref_count(id)?;
        if !self.indexed {
            return Ok(false);
        }
        if refs == 0 {
            return Err(PoolError::Free { id, capacity: self.capacity as usize });
        }
        let known = self.find(key).is_some();
        let block = self.blocks.get_mut(&id).unwrap();
        if known || block.key.is_some() || generation != self.generation {
            return Ok(false);
        }
        block.key = Some((key, generation));
        Ok(true)
    }

    pub fn lookup(&mut self, key: Key) -> Option<BlockId> {
        let id = self.find(key)?;
        self.blocks.get_mut(&id).unwrap().refs += 1;
        Some(id)
    }

    pub fn evict(&mut self, n: usize) -> usize {
        let mut evicted = self.evictable();
        evicted.truncate(n);
        for id in &evicted {
            self.blocks.remove(id);
            self.free.insert(*id);
        }
        evicted.len()
    }

    pub fn clear_index(&mut self) {
        if self.indexed {
            self.generation += 1;
            self.evict(usize::MAX);
        }
    }

    /// Compares all that can be seen of a pool.
    pub fn assert_like(&self, pool: &BlockPool) {
        assert_eq!(pool.num_free(), self.free.len());
        assert_eq!(pool.num_evictable(), self.evictable().len());
        assert_eq!(pool.num_available(), self.num_available());
        assert_eq!(pool.generation(), self.generation);
        for id in 0..=self.capacity + 1 {
            assert_eq!(pool.ref_count(id), self.ref_count(id), "block {id}");
        }
    }

    fn check(&self, id: BlockId) -> Result<(), PoolError> {
        if (1..=self.capacity).contains(&id) {
            Ok(())
        } else {
            Err(PoolError::Foreign { id, capacity: self.capacity as usize })
        }
    }
}
