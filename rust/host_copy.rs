//! Carries out descriptors with the processor, for KV caches in host memory.

use std::ops::Range;
use std::thread::Builder;

use crate::transfer::Descriptors;

/// A thread is worth starting for this many bytes: copying them takes some ten times
/// as long as starting it does.
const BYTES_PER_THREAD: u64 = 1 << 20;

/// Copies everything in `descriptors` with up to `threads` threads, this one included.
///
/// # Safety
/// Every range of the descriptors is valid: the sources for reads, the destinations for
/// writes, and nothing else writes the sources or touches the destinations until this
/// returns. Sources and destinations do not overlap.
pub unsafe fn copy(descriptors: &Descriptors, threads: usize) {
    let total = descriptors.total_bytes();
    let threads = (threads as u64).min(total / BYTES_PER_THREAD).max(1);
    let share = |i| i * total / threads..(i + 1) * total / threads;
    std::thread::scope(|scope| {
        for i in 1..threads {
            // SAFETY: as the caller promises; the shares are disjoint, so no two threads
            // write the same byte.
            let work = move || unsafe { copy_share(descriptors, share(i)) };
            if Builder::new().spawn_scoped(scope, work).is_err() {
                // The system has no thread to spare.
                work();
            }
        }
        // SAFETY: as above.
        unsafe { copy_share(descriptors, share(0)) };
    });
}

/// Copies the bytes `share` of all descriptors laid end to end.
///
/// # Safety
/// As for [`copy`], for the bytes of the share.
unsafe fn copy_share(descriptors: &Descriptors, share: Range<u64>) {
    let (src, dst, size) = descriptors.arrays();
    let mut begin = 0;
    for ((&src, &dst), &size) in src.iter().zip(dst).zip(size) {
        let end = begin + size as u64;
        let (from, to) = (share.start.max(begin), share.end.min(end));
        if from < to {
            let offset = (from - begin) as usize;
            let len = (to - from) as usize;
            // SAFETY: `offset + len <= size`, so both ranges are parts of the
            // descriptor's, which the caller vouches for.
            unsafe {
                std::ptr::copy_nonoverlapping(
                    (src as usize as *const u8).add(offset),
                    (dst as usize as *mut u8).add(offset),
                    len,
                );
            }
        }
        if end >= share.end {
            return;
        }
        begin = end;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GUARD: u8 = 0xaa;

    /// Numbers that look random (Marsaglia's xorshift64).
    struct Random(u64);

    impl Random {
        fn below(&mut self, n: usize) -> usize {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 % n as u64) as usize
        }
    }

    /// Descriptors of the given sizes from one buffer to another, where every byte between
    /// the destinations is a guard, and what copying them must lead to.
    struct Case {
        descriptors: Descriptors,
        src: Vec<u8>,
        dst: Vec<u8>,
        /// Where the bytes of the descriptors, laid end to end, go to and come from.
        places: Vec<(usize, usize)>,
    }

    impl Case {
        fn new(random: &mut Random, sizes: &[usize]) -> Self {
            let total: usize = sizes.iter().sum();
            // No source byte looks like a guard, so that what was not copied shows.
            let src: Vec<u8> = (0..total + 1000).map(|i| (i * i % 167) as u8).collect();
            let mut dst = vec![GUARD; total + 64 * (sizes.len() + 1)];
            let mut order: Vec<_> = (0..sizes.len()).collect();
            order.sort_by_cached_key(|_| random.below(1000));
            let mut to = vec![0; sizes.len()];
            let mut next = 1 + random.below(63);
            for i in order {
                to[i] = next;
                next += sizes[i] + random.below(64);
            }
            let mut descriptors = Descriptors::default();
            let mut places = Vec::new();
            for (&to, &size) in to.iter().zip(sizes) {
                let from = random.below(src.len() - size + 1);
                let (device, host) = (src[from..].as_ptr(), dst[to..].as_mut_ptr());
                let (device, host) = (device as usize as u64, host as usize as u64);
                descriptors.push(device as i64, host as i64, size as i64);
                places.extend((to..to + size).zip(from..from + size));
            }
            Self { descriptors, src, dst, places }
        }

        /// Runs `copy` and compares all of the destination with the bytes `share` copied.
        fn check(&mut self, share: Range<usize>, copy: impl FnOnce(&Descriptors)) {
            self.dst.fill(GUARD);
            let mut expected = self.dst.clone();
            for &(to, from) in &self.places[share] {
                expected[to] = self.src[from];
            }
            copy(&self.descriptors);
            assert!(self.dst == expected);
        }
    }

    #[test]
    fn a_share_is_copied_to_the_byte() {
        let mut case = Case::new(&mut Random(1), &[5, 1, 0, 9, 2, 7]);
        for start in 0..=24 {
            for end in start..=24 {
                // SAFETY: the buffers of the case live and nobody else uses them.
                let copy = |d: &Descriptors| unsafe { copy_share(d, start as u64..end as u64) };
                case.check(start..end, copy);
            }
        }
    }

    #[test]
    fn threads_copy_every_byte_once_and_no_other() {
        let mut random = Random(2);
        for threads in [0, 1, 2, 3, 4, 4, 3, 2] {
            // Some large ones, which are split, among many small ones.
            let mut sizes: Vec<_> = (0..100).map(|_| random.below(300)).collect();
            sizes.extend((0..threads).map(|_| (1 << 20) + random.below(1 << 10)));
            sizes.sort_by_cached_key(|_| random.below(1000));
            let total: usize = sizes.iter().sum();
            assert!(total as u64 / BYTES_PER_THREAD >= threads as u64);
            let mut case = Case::new(&mut random, &sizes);
            // SAFETY: the buffers of the case live and nobody else uses them.
            case.check(0..total, |descriptors| unsafe { copy(descriptors, threads) });
        }
    }

    #[test]
    fn totals_around_the_worth_of_a_thread() {
        let mut random = Random(3);
        for total in [0, 1, (1 << 20) - 1, 1 << 20, (2 << 20) - 1, 2 << 20, (2 << 20) + 1] {
            let mut case = Case::new(&mut random, &[total / 3, total - total / 3]);
            // SAFETY: the buffers of the case live and nobody else uses them.
            case.check(0..total, |descriptors| unsafe { copy(descriptors, 2) });
        }
    }

    #[test]
    fn nothing_to_copy() {
        // SAFETY: there is no range.
        unsafe { copy(&Descriptors::default(), 4) };
    }
}
