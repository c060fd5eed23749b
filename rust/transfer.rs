//! Block pairs to copy descriptors: coalesced, and checked against registered memory.
//!
//! A block of a KV cache group consists of *segments*, one or more per layer: block `b`
//! has `bytes` bytes at `device + b * stride`. The host has arrays with a part of every
//! block. Where a segment fills its part, and its blocks are back to back on the device too,
//! neighbours on both sides are one long copy. The result has the form of `torch.ops._C_ascend.swap_blocks_batch` and
//! vLLM's own batched copies: three arrays of source, destination and size in bytes.

use crate::request_table::BlockPair;

/// The most KV cache groups: block keys number them with 16 bits.
pub const MAX_GROUPS: usize = 1 << 16;

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
    /// Bytes from one host block to the next.
    pub host_stride: u64,
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
    /// A segment or a pair names a group that the layout does not have.
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

    /// Adds a copy of `size` bytes.
    pub(crate) fn push(&mut self, src: i64, dst: i64, size: i64) {
        self.src.push(src);
        self.dst.push(dst);
        self.size.push(size);
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
    /// A group may have no segments: on a pipeline stage without layers of it, its blocks
    /// hold nothing to copy.
    ///
    /// # Errors
    /// [`TransferError::OutOfRegion`], [`TransferError::BadSegment`],
    /// [`TransferError::UnknownGroup`] for segments of groups beyond `num_groups` or
    /// [`MAX_GROUPS`].
    pub fn new(
        num_device_blocks: u32,
        num_host_blocks: u32,
        num_groups: usize,
        segments: &[Segment],
        device: &[Region],
        host: &[Region],
    ) -> Result<Self, TransferError> {
        let groups = num_groups.min(MAX_GROUPS);
        let mut by_group = vec![Vec::new(); groups];
        for (i, segment) in segments.iter().enumerate() {
            let Segment { group, stride, bytes, host_stride, .. } = *segment;
            if group as usize >= groups {
                return Err(TransferError::UnknownGroup { group, groups });
            }
            for (side, start, stride, blocks, regions) in [
                ("device", segment.device, stride, num_device_blocks, device),
                ("host", segment.host, host_stride, num_host_blocks, host),
            ] {
                let bad = TransferError::BadSegment { segment: i, bytes, stride };
                if bytes == 0 || stride < bytes {
                    return Err(bad);
                }
                let end = u64::from(blocks.saturating_sub(1))
                    .checked_mul(stride)
                    .and_then(|last| last.checked_add(bytes))
                    .and_then(|len| start.checked_add(len))
                    .filter(|&end| i64::try_from(end).is_ok())
                    .ok_or(bad)?;
                if !regions.iter().any(|r| r.start <= start && end - r.start <= r.len) {
                    return Err(TransferError::OutOfRegion { segment: i, side, start, end });
                }
            }
            by_group[group as usize].push(*segment);
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
        let mut descriptors = Descriptors::default();
        self.for_each_copy(direction, pairs, |src, dst, size| descriptors.push(src, dst, size))?;
        Ok(descriptors)
    }

    /// Writes the same into arrays that are there already, as far as there is room.
    ///
    /// Returns how many copies there are; if it is more than the shortest array has room for,
    /// the rest is missing.
    ///
    /// # Errors
    /// As for [`BlockLayout::descriptors`].
    pub fn write_descriptors(
        &self,
        direction: Direction,
        pairs: &[BlockPair],
        [src, dst, size]: [&mut [i64]; 3],
    ) -> Result<usize, TransferError> {
        let mut count = 0;
        self.for_each_copy(direction, pairs, |from, to, bytes| {
            if let (Some(src), Some(dst), Some(size)) =
                (src.get_mut(count), dst.get_mut(count), size.get_mut(count))
            {
                (*src, *dst, *size) = (from, to, bytes);
            }
            count += 1;
        })?;
        Ok(count)
    }

    /// Calls `copy` with the source, the destination and the bytes of each copy.
    fn for_each_copy(
        &self,
        direction: Direction,
        pairs: &[BlockPair],
        mut copy: impl FnMut(i64, i64, i64),
    ) -> Result<(), TransferError> {
        self.check(direction, pairs)?;
        let mut sorted = pairs.to_vec();
        sorted.sort_unstable_by_key(|pair| (pair.group, pair.device));
        for run in sorted
            .chunk_by(|a, b| a.group == b.group && a.device + 1 == b.device && a.host + 1 == b.host)
        {
            for segment in &self.segments[run[0].group as usize] {
                let together =
                    segment.stride == segment.bytes && segment.host_stride == segment.bytes;
                let blocks_per_copy = if together { run.len() } else { 1 };
                for pair in run.iter().step_by(blocks_per_copy) {
                    let device = segment.device + u64::from(pair.device) * segment.stride;
                    let host = segment.host + u64::from(pair.host - 1) * segment.host_stride;
                    let size = segment.bytes * blocks_per_copy as u64;
                    let (src, dst) = match direction {
                        Direction::DeviceToHost => (device, host),
                        Direction::HostToDevice => (host, device),
                    };
                    copy(src as i64, dst as i64, size as i64);
                }
            }
        }
        Ok(())
    }

    fn check(&self, direction: Direction, pairs: &[BlockPair]) -> Result<(), TransferError> {
        for pair in pairs {
            let groups = self.segments.len();
            if pair.group as usize >= groups {
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

#[cfg(test)]
mod tests {
    use super::*;

    const DEVICE: u64 = 0x10_0000;
    const HOST: u64 = 0x80_0000;
    const EVERYWHERE: [Region; 1] = [Region { start: 0, len: i64::MAX as u64 }];

    fn segment(group: u32, device: u64, stride: u64, bytes: u64, host: u64) -> Segment {
        Segment { group, device, stride, bytes, host, host_stride: bytes }
    }

    fn layout(segments: &[Segment]) -> BlockLayout {
        BlockLayout::new(100, 50, 3, segments, &EVERYWHERE, &EVERYWHERE).unwrap()
    }

    fn pairs(group: u32, ids: &[(u32, u32)]) -> Vec<BlockPair> {
        ids.iter().map(|&(device, host)| BlockPair { group, device, host }).collect()
    }

    /// The copies as `(device, host, size)`, whichever way they go.
    fn copies(layout: &BlockLayout, pairs: &[BlockPair]) -> Vec<(u64, u64, u64)> {
        let rows = |direction| {
            let (src, dst, size) = layout.descriptors(direction, pairs).unwrap().into_arrays();
            assert_eq!((src.len(), dst.len()), (size.len(), size.len()));
            let (device, host) = match direction {
                Direction::DeviceToHost => (src, dst),
                Direction::HostToDevice => (dst, src),
            };
            let rows = device.iter().zip(&host).zip(&size);
            rows.map(|((&d, &h), &s)| (d as u64, h as u64, s as u64)).collect::<Vec<_>>()
        };
        let stored = rows(Direction::DeviceToHost);
        assert_eq!(stored, rows(Direction::HostToDevice));
        stored
    }

    #[test]
    fn neighbours_on_both_sides_are_one_copy() {
        let layout = layout(&[segment(0, DEVICE, 256, 256, HOST)]);
        let run = pairs(0, &[(10, 1), (11, 2), (12, 3), (20, 4)]);
        assert_eq!(
            copies(&layout, &run),
            [(DEVICE + 10 * 256, HOST, 3 * 256), (DEVICE + 20 * 256, HOST + 3 * 256, 256)]
        );
        let descriptors = layout.descriptors(Direction::DeviceToHost, &run).unwrap();
        assert_eq!(descriptors.total_bytes(), 4 * 256);
        assert_eq!(descriptors.arrays().2, [3 * 256, 256]);
    }

    #[test]
    fn descriptors_are_written_as_far_as_there_is_room() {
        let layout = layout(&[segment(0, DEVICE, 256, 256, HOST), segment(0, 0, 64, 32, 0)]);
        let run = pairs(0, &[(10, 1), (11, 2), (20, 4)]);
        for direction in [Direction::DeviceToHost, Direction::HostToDevice] {
            let all = layout.descriptors(direction, &run).unwrap();
            let (src, dst, size) = all.arrays();
            assert_eq!(size.len(), 5);
            for room in [0, 1, 4, 5, 8] {
                let mut out = [const { [-1; 8] }; 3];
                let [a, b, c] = out.each_mut().map(|array| &mut array[..room]);
                assert_eq!(layout.write_descriptors(direction, &run, [a, b, c]), Ok(5));
                let written = room.min(5);
                for (array, expected) in out.iter().zip([src, dst, size]) {
                    assert_eq!(array[..written], expected[..written]);
                    assert!(array[written..].iter().all(|&value| value == -1));
                }
            }
        }
        let wrong = pairs(0, &[(10, 1), (100, 2)]);
        let error = layout.descriptors(Direction::DeviceToHost, &wrong).unwrap_err();
        let written =
            layout.write_descriptors(Direction::DeviceToHost, &wrong, [&mut [], &mut [], &mut []]);
        assert_eq!(written, Err(error));
    }

    #[test]
    fn the_order_of_the_pairs_does_not_matter() {
        let layout = layout(&[segment(0, DEVICE, 256, 256, HOST)]);
        let sorted = copies(&layout, &pairs(0, &[(5, 1), (6, 2), (7, 3)]));
        assert_eq!(sorted, [(DEVICE + 5 * 256, HOST, 3 * 256)]);
        assert_eq!(copies(&layout, &pairs(0, &[(7, 3), (6, 2), (5, 1)])), sorted);
        assert_eq!(copies(&layout, &pairs(0, &[(6, 2), (7, 3), (5, 1)])), sorted);
    }

    #[test]
    fn neighbours_on_one_side_only_stay_apart() {
        let layout = layout(&[segment(0, DEVICE, 256, 256, HOST)]);
        for ids in [
            [(5, 1), (6, 3)],  // on the device
            [(5, 1), (7, 2)],  // on the host
            [(5, 2), (6, 1)],  // in opposite orders
            [(5, 10), (6, 9)], // likewise
        ] {
            let expected = ids.map(|(device, host)| {
                (DEVICE + u64::from(device) * 256, HOST + u64::from(host - 1) * 256, 256)
            });
            assert_eq!(copies(&layout, &pairs(0, &ids)), expected);
        }
    }

    #[test]
    fn with_gaps_between_device_blocks_each_block_is_a_copy() {
        let layout = layout(&[segment(0, DEVICE, 1024, 256, HOST)]);
        assert_eq!(
            copies(&layout, &pairs(0, &[(1, 1), (2, 2), (3, 3)])),
            [
                (DEVICE + 1024, HOST, 256),
                (DEVICE + 2048, HOST + 256, 256),
                (DEVICE + 3072, HOST + 512, 256)
            ]
        );
    }

    #[test]
    fn each_segment_of_a_block_is_copied() {
        // K first, then V, of 100 blocks each; and a scale with gaps.
        let key = segment(0, DEVICE, 64, 64, HOST);
        let value = segment(0, DEVICE + 6400, 64, 64, HOST + 3200);
        let scale = segment(0, 16, 8, 4, 1024);
        let layout = layout(&[key, value, scale]);
        assert_eq!(layout.block_bytes(0), 132);
        let run = pairs(0, &[(8, 2), (9, 3)]);
        assert_eq!(
            copies(&layout, &run),
            [
                (DEVICE + 512, HOST + 64, 128),
                (DEVICE + 6400 + 512, HOST + 3200 + 64, 128),
                (16 + 64, 1024 + 4, 4),
                (16 + 72, 1024 + 8, 4),
            ]
        );
        let descriptors = layout.descriptors(Direction::DeviceToHost, &run).unwrap();
        assert_eq!(descriptors.total_bytes(), 2 * 132);
    }

    #[test]
    fn with_gaps_between_host_blocks_each_block_is_a_copy() {
        let layout = layout(&[Segment { host_stride: 1024, ..segment(0, DEVICE, 256, 256, HOST) }]);
        assert_eq!(
            copies(&layout, &pairs(0, &[(1, 1), (2, 2), (3, 4)])),
            [
                (DEVICE + 256, HOST, 256),
                (DEVICE + 512, HOST + 1024, 256),
                (DEVICE + 768, HOST + 3 * 1024, 256)
            ]
        );
    }

    #[test]
    fn groups_have_segments_of_their_own_and_do_not_merge() {
        let second = segment(1, 0x5000, 32, 32, 0x9000);
        let layout = layout(&[segment(0, DEVICE, 64, 64, HOST), second]);
        assert_eq!([0, 1, 2].map(|group| layout.block_bytes(group)), [64, 32, 0]);
        let both = [pairs(1, &[(3, 3), (4, 4)]), pairs(0, &[(1, 1), (2, 2)])].concat();
        assert_eq!(
            copies(&layout, &both),
            [(DEVICE + 64, HOST, 128), (0x5000 + 96, 0x9000 + 64, 64)]
        );
    }

    #[test]
    fn nothing_to_copy_is_no_copy() {
        let layout = layout(&[segment(0, DEVICE, 64, 64, HOST)]);
        assert_eq!(copies(&layout, &[]), []);
        assert_eq!(Descriptors::default().total_bytes(), 0);
    }

    #[test]
    fn a_group_without_segments_has_nothing_to_copy() {
        let layout = layout(&[segment(0, DEVICE, 64, 64, HOST), segment(2, 0, 8, 8, 0)]);
        assert_eq!(copies(&layout, &pairs(1, &[(1, 1), (2, 2)])), []);
        let with_others = [pairs(1, &[(1, 1)]), pairs(0, &[(2, 2)])].concat();
        assert_eq!(copies(&layout, &with_others), [(DEVICE + 128, HOST + 64, 64)]);
    }

    #[test]
    fn every_wrong_pair_is_an_error() {
        let layout = layout(&[segment(0, DEVICE, 64, 64, HOST), segment(2, 0, 8, 8, 0)]);
        let errors = |pairs: &[BlockPair]| {
            [Direction::DeviceToHost, Direction::HostToDevice]
                .map(|direction| layout.descriptors(direction, pairs).unwrap_err())
        };
        let good = pairs(0, &[(1, 1), (99, 50)]);
        assert!(layout.descriptors(Direction::DeviceToHost, &good).is_ok());
        for (group, device, host, error) in [
            (3, 1, 2, TransferError::UnknownGroup { group: 3, groups: 3 }),
            (0, 0, 2, TransferError::DeviceBlock { id: 0, last: 99 }),
            (0, 100, 2, TransferError::DeviceBlock { id: 100, last: 99 }),
            (0, u32::MAX, 2, TransferError::DeviceBlock { id: u32::MAX, last: 99 }),
            (0, 2, 0, TransferError::HostBlock { id: 0, last: 50 }),
            (0, 2, 51, TransferError::HostBlock { id: 51, last: 50 }),
        ] {
            let wrong = [good.clone(), pairs(group, &[(device, host)])].concat();
            assert_eq!(errors(&wrong), [error.clone(), error]);
        }
    }

    #[test]
    fn two_copies_to_one_place_are_an_error_two_copies_from_one_place_are_not() {
        let layout = layout(&[segment(0, DEVICE, 64, 64, HOST), segment(1, 0, 64, 64, 0)]);
        let store = |pairs: &[BlockPair]| layout.descriptors(Direction::DeviceToHost, pairs);
        let load = |pairs: &[BlockPair]| layout.descriptors(Direction::HostToDevice, pairs);
        let one_host = [pairs(0, &[(1, 7), (2, 5)]), pairs(1, &[(3, 7)])].concat();
        let error = store(&one_host).unwrap_err();
        assert_eq!(error, TransferError::DuplicateDestination { side: "host", id: 7 });
        assert_eq!(error.to_string(), "host block 7 is the destination of two copies");
        assert_eq!(load(&one_host).unwrap().total_bytes(), 3 * 64);
        let one_device = pairs(0, &[(4, 1), (5, 2), (4, 3)]);
        let error = load(&one_device).unwrap_err();
        assert_eq!(error, TransferError::DuplicateDestination { side: "device", id: 4 });
        assert_eq!(store(&one_device).unwrap().total_bytes(), 3 * 64);
    }

    #[test]
    fn errors_name_the_id_and_the_bound() {
        let device = TransferError::DeviceBlock { id: 100, last: 99 };
        assert_eq!(
            device.to_string(),
            "device block 100 is not in this cache, whose blocks are 1..=99"
        );
        let host = TransferError::HostBlock { id: 51, last: 50 };
        assert_eq!(host.to_string(), "host block 51 is not in this pool, whose blocks are 1..=50");
        let group = TransferError::UnknownGroup { group: 3, groups: 2 };
        assert_eq!(
            group.to_string(),
            "KV cache group 3 is not in this layout, whose groups are 0..2"
        );
    }

    #[test]
    fn segments_must_lie_in_a_region_to_the_last_byte() {
        // 4 device blocks with gaps need 3 * 100 + 60 bytes, 5 host blocks 5 * 60.
        let new = |device: Region, host: Region| {
            let elsewhere = Region { start: 1 << 40, len: 1 << 20 };
            let segments = [segment(0, 1000, 100, 60, 5000)];
            BlockLayout::new(4, 5, 1, &segments, &[elsewhere, device], &[elsewhere, host])
        };
        let device = Region { start: 1000, len: 360 };
        let host = Region { start: 5000, len: 300 };
        assert!(new(device, host).is_ok());
        let out =
            |side, start, end| Some(TransferError::OutOfRegion { segment: 0, side, start, end });
        for wrong in [
            Region { start: 1000, len: 359 },
            Region { start: 1001, len: 1000 },
            Region { start: 900, len: 459 },
            Region { start: 1001, len: u64::MAX },
        ] {
            assert_eq!(new(wrong, host).err(), out("device", 1000, 1360));
        }
        for wrong in [Region { start: 5000, len: 299 }, Region { start: 5001, len: 300 }] {
            assert_eq!(new(device, wrong).err(), out("host", 5000, 5300));
        }
        assert_eq!(
            out("host", 0x1388, 0x14b4).unwrap().to_string(),
            "segment 0: bytes 0x1388..0x14b4 on the host are in no registered region"
        );
    }

    #[test]
    fn there_are_only_so_many_groups() {
        let new = |num_groups, group| {
            let segments = [segment(group, 0, 64, 64, 0)];
            BlockLayout::new(100, 50, num_groups, &segments, &EVERYWHERE, &EVERYWHERE).map(|_| ())
        };
        assert_eq!(new(2, 1), Ok(()));
        assert_eq!(new(2, 2), Err(TransferError::UnknownGroup { group: 2, groups: 2 }));
        assert_eq!(new(usize::MAX, MAX_GROUPS as u32 - 1), Ok(()));
        for group in [MAX_GROUPS as u32, u32::MAX] {
            let error = TransferError::UnknownGroup { group, groups: MAX_GROUPS };
            assert_eq!(new(usize::MAX, group), Err(error));
        }
    }

    #[test]
    fn segments_that_do_not_add_up_are_refused() {
        let good = segment(0, 0, 64, 64, 0);
        let bad = |segment: Segment| {
            let Segment { stride, bytes, .. } = segment;
            let layout = BlockLayout::new(100, 50, 1, &[good, segment], &EVERYWHERE, &EVERYWHERE);
            let error = TransferError::BadSegment { segment: 1, bytes, stride };
            assert_eq!(layout.unwrap_err(), error);
        };
        bad(segment(0, 0, 64, 0, 0));
        bad(segment(0, 0, 64, 65, 0));
        bad(segment(0, 0, u64::MAX, 64, 0));
        bad(segment(0, u64::MAX - 5, 64, 64, 0));
        bad(segment(0, 0, 64, 64, u64::MAX - 5));
        bad(segment(0, 0, 1 << 62, 1 << 62, 0));
        bad(segment(0, i64::MAX as u64 - 5, 64, 64, 0));
        let host_blocks_overlap = Segment { host_stride: 63, ..good };
        let layout = BlockLayout::new(100, 50, 1, &[host_blocks_overlap], &EVERYWHERE, &EVERYWHERE);
        let error = TransferError::BadSegment { segment: 0, bytes: 64, stride: 63 };
        assert_eq!(layout.unwrap_err(), error);
        let error = TransferError::BadSegment { segment: 1, bytes: 65, stride: 64 };
        let text = "segment 1: 65 bytes per block with a stride of 64 do not add up";
        assert_eq!(error.to_string(), text);
    }
}
