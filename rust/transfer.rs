//! Block pairs to copy descriptors: coalesced, and checked against registered memory.
//!
//! A block of a KV cache group consists of *segments*, one or more per layer: block `b`
//! has `bytes` bytes at `device + b * stride`. On the host, every segment has an array
//! of its own with its blocks back to back, so that neighbours on both sides are one
//! long copy. The result has the form of `torch.ops._C_ascend.swap_blocks_batch` and
//! vLLM's own batched copies: three arrays of source, destination and size in bytes.

use crate::request_table::BlockPair;

/// Which way to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Direction {
    /// D2H: a store.
    DeviceToHost,
    /// H2D: a load.
    HostToDevice,
}

/// One contiguous part of each block of a group.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Segment {
    /// KV cache group.
    pub group: u32,
    /// Address of device block 0.
    pub device: u64,
    /// Bytes from one device block to the next.
    pub stride: u64,
    /// Bytes of the part.
    pub bytes: u64,
    /// Address of host block 1.
    pub host: u64,
}

/// A piece of memory that segments may lie in.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its first address.
    pub start: u64,
    /// Its length in bytes.
    pub len: u64,
}

/// Why a layout or a plan was refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TransferError {
    /// A segment reaches out of every region registered for its side.
    #[error(
        "segment {segment}: bytes {start:#x}..{end:#x} on the {side} are in no registered region"
    )]
    OutOfRegion {
        /// Its place in the list.
        segment: usize,
        /// "device" or "host".
        side: &'static str,
        /// First address.
        start: u64,
        /// Past the last address.
        end: u64,
    },
    /// Blocks of a segment would overlap, or addresses overflow.
    #[error("segment {segment}: {bytes} bytes per block with a stride of {stride} do not add up")]
    BadSegment {
        /// Its place in the list.
        segment: usize,
        /// Bytes per block.
        bytes: u64,
        /// Bytes from block to block.
        stride: u64,
    },
    /// A pair names a group without segments.
    #[error("KV cache group {group} is not in this layout, whose groups are 0..{groups}")]
    UnknownGroup {
        /// The offending group.
        group: u32,
        /// Groups of the layout.
        groups: usize,
    },
    /// A device block is the null block or beyond the cache.
    #[error("device block {id} is not in this cache, whose blocks are 1..={last}")]
    DeviceBlock {
        /// The offending id.
        id: u32,
        /// The largest id.
        last: u32,
    },
    /// A host block is the null block or beyond the pool.
    #[error("host block {id} is not in this pool, whose blocks are 1..={last}")]
    HostBlock {
        /// The offending id.
        id: u32,
        /// The largest id.
        last: u32,
    },
    /// Two copies of one plan would write the same block.
    #[error("{side} block {id} is the destination of two copies")]
    DuplicateDestination {
        /// "device" or "host".
        side: &'static str,
        /// The offending id.
        id: u32,
    },
}

/// Copies to make, in bytes: `size[i]` bytes from address `src[i]` to `dst[i]`.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Descriptors {
    src: Vec<i64>,
    dst: Vec<i64>,
    size: Vec<i64>,
}

impl Descriptors {
    /// Source addresses, destination addresses and sizes, of equal length.
    pub fn arrays(&self) -> (&[i64], &[i64], &[i64]) {
        (&self.src, &self.dst, &self.size)
    }

    /// The three arrays, taken out.
    pub fn into_arrays(self) -> (Vec<i64>, Vec<i64>, Vec<i64>) {
        (self.src, self.dst, self.size)
    }

    /// Bytes in all.
    pub fn total_bytes(&self) -> u64 {
        self.size.iter().map(|&size| size as u64).sum()
    }

    fn push(&mut self, direction: Direction, device: u64, host: u64, size: u64) {
        let (src, dst) = match direction {
            Direction::DeviceToHost => (device, host),
            Direction::HostToDevice => (host, device),
        };
        self.src.push(src as i64);
        self.dst.push(dst as i64);
        self.size.push(size as i64);
    }
}

/// Where the blocks of a KV cache and of a host pool are in memory.
#[derive(Debug)]
pub struct BlockLayout {
    num_device_blocks: u32,
    num_host_blocks: u32,
    /// By group.
    segments: Vec<Vec<Segment>>,
}

impl BlockLayout {
    /// A layout of device blocks `0..num_device_blocks` (0 is the null block) and host
    /// blocks `1..=num_host_blocks`, with every segment inside the given regions.
    ///
    /// # Errors
    /// [`TransferError::OutOfRegion`], [`TransferError::BadSegment`].
    pub fn new(
        num_device_blocks: u32,
        num_host_blocks: u32,
        segments: &[Segment],
        device: &[Region],
        host: &[Region],
    ) -> Result<Self, TransferError> {
        let groups = segments.iter().map(|s| s.group as usize + 1).max().unwrap_or(0);
        let mut by_group = vec![Vec::new(); groups];
        for (i, segment) in segments.iter().enumerate() {
            let Segment { stride, bytes, .. } = *segment;
            let bad = TransferError::BadSegment { segment: i, bytes, stride };
            if bytes == 0 || stride < bytes {
                return Err(bad);
            }
            let last = u64::from(num_device_blocks.saturating_sub(1));
            let device_len = last.checked_mul(stride).and_then(|n| n.checked_add(bytes));
            let host_len = u64::from(num_host_blocks).checked_mul(bytes);
            for (side, start, len, regions) in [
                ("device", segment.device, device_len, device),
                ("host", segment.host, host_len, host),
            ] {
                let end = len
                    .and_then(|len| start.checked_add(len))
                    .filter(|&end| i64::try_from(end).is_ok())
                    .ok_or(bad.clone())?;
                if !regions.iter().any(|r| r.start <= start && end <= r.start + r.len) {
                    return Err(TransferError::OutOfRegion { segment: i, side, start, end });
                }
            }
            by_group[segment.group as usize].push(*segment);
        }
        Ok(Self { num_device_blocks, num_host_blocks, segments: by_group })
    }

    /// Bytes that one block of `group` takes.
    pub fn block_bytes(&self, group: u32) -> u64 {
        self.segments.get(group as usize).map_or(0, |s| s.iter().map(|s| s.bytes).sum())
    }

    /// The copies that move `pairs`; neighbours on both sides become one.
    ///
    /// # Errors
    /// [`TransferError::UnknownGroup`], [`TransferError::DeviceBlock`],
    /// [`TransferError::HostBlock`], [`TransferError::DuplicateDestination`].
    pub fn descriptors(
        &self,
        direction: Direction,
        pairs: &[BlockPair],
    ) -> Result<Descriptors, TransferError> {
        self.check(direction, pairs)?;
        let mut sorted = pairs.to_vec();
        sorted.sort_unstable_by_key(|pair| (pair.group, pair.device));
        let mut descriptors = Descriptors::default();
        for run in sorted
            .chunk_by(|a, b| a.group == b.group && a.device + 1 == b.device && a.host + 1 == b.host)
        {
            for segment in &self.segments[run[0].group as usize] {
                let together = segment.stride == segment.bytes;
                let blocks_per_copy = if together { run.len() } else { 1 };
                for pair in run.iter().step_by(blocks_per_copy) {
                    let device = segment.device + u64::from(pair.device) * segment.stride;
                    let host = segment.host + u64::from(pair.host - 1) * segment.bytes;
                    let size = segment.bytes * blocks_per_copy as u64;
                    descriptors.push(direction, device, host, size);
                }
            }
        }
        Ok(descriptors)
    }

    fn check(&self, direction: Direction, pairs: &[BlockPair]) -> Result<(), TransferError> {
        for pair in pairs {
            if self.segments.get(pair.group as usize).is_none_or(Vec::is_empty) {
                let groups = self.segments.len();
                return Err(TransferError::UnknownGroup { group: pair.group, groups });
            }
            if pair.device == 0 || pair.device >= self.num_device_blocks {
                let last = self.num_device_blocks.saturating_sub(1);
                return Err(TransferError::DeviceBlock { id: pair.device, last });
            }
            if pair.host == 0 || pair.host > self.num_host_blocks {
                let last = self.num_host_blocks;
                return Err(TransferError::HostBlock { id: pair.host, last });
            }
        }
        let side = match direction {
            Direction::DeviceToHost => "host",
            Direction::HostToDevice => "device",
        };
        let mut destinations: Vec<u32> = pairs
            .iter()
            .map(|pair| match direction {
                Direction::DeviceToHost => pair.host,
                Direction::HostToDevice => pair.device,
            })
            .collect();
        destinations.sort_unstable();
        match destinations.windows(2).find(|pair| pair[0] == pair[1]) {
            Some(pair) => Err(TransferError::DuplicateDestination { side, id: pair[0] }),
            None => Ok(()),
        }
    }
}
