//! Carries out descriptors with the processor, for KV caches in host memory.

use std::ops::Range;

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
            scope.spawn(move || unsafe { copy_share(descriptors, share(i)) });
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
