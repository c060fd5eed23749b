//! Which transfers are through: an event is done when every worker has reported it.
//!
//! The scheduler opens an event when it plans a step's stores. Each of the world's
//! workers (tensor x pipeline parallel) reports it once, in any order and from any
//! thread. The event is decided by whoever reports last: done if all succeeded, failed
//! if one did not, and then forgotten.

use std::sync::Arc;

use crate::cow_map::CowMap;
use crate::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

/// Where an event stands after a report.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// Other workers have yet to report.
    Pending,
    /// This was the last report, and every worker succeeded.
    Done,
    /// This was the last report, and at least one worker failed.
    Failed,
}

/// Why a report or an event was refused; the tracker is as it was before the call.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum CompletionError {
    /// The event was never opened, or is decided already.
    #[error("event {event} is not open")]
    UnknownEvent {
        /// The offending event.
        event: u64,
    },
    /// The event is open already.
    #[error("event {event} is open already")]
    DuplicateEvent {
        /// The offending event.
        event: u64,
    },
    /// There is no such worker.
    #[error("worker {rank} reported event {event}, but the workers are 0..{world_size}")]
    UnknownRank {
        /// The event reported.
        event: u64,
        /// The offending rank.
        rank: usize,
        /// Workers in the world.
        world_size: usize,
    },
    /// The worker has reported this event before.
    #[error("worker {rank} (of {world_size}) reported event {event} twice")]
    DuplicateReport {
        /// The event reported.
        event: u64,
        /// The offending rank.
        rank: usize,
        /// Workers in the world.
        world_size: usize,
    },
}

struct Event {
    /// Bit `rank % 64` of word `rank / 64`: that worker has reported.
    reported: Box<[AtomicU64]>,
    missing: AtomicUsize,
    failed: AtomicBool,
}

/// Counts the workers' reports of each open event.
pub struct CompletionTracker {
    world_size: usize,
    events: CowMap<u64, Event>,
}

/// Events are open for a step or a few, so there are only ever a handful.
const BUCKETS: usize = if cfg!(loom) { 1 } else { 16 };

impl CompletionTracker {
    /// A tracker for `world_size` workers, with ranks `0..world_size`.
    pub fn new(world_size: usize) -> Self {
        Self { world_size, events: CowMap::new(BUCKETS) }
    }

    /// Starts to wait for every worker's report of `event`.
    ///
    /// # Errors
    /// [`CompletionError::DuplicateEvent`].
    pub fn open(&self, event: u64) -> Result<(), CompletionError> {
        let fresh = Event {
            reported: (0..self.world_size.div_ceil(64)).map(|_| AtomicU64::new(0)).collect(),
            missing: AtomicUsize::new(self.world_size),
            failed: AtomicBool::new(false),
        };
        if self.events.compare_exchange(&event, None, Some(Arc::new(fresh))) {
            Ok(())
        } else {
            Err(CompletionError::DuplicateEvent { event })
        }
    }

    /// Records that worker `rank` is through with `event`, with success if `ok`.
    ///
    /// # Errors
    /// [`CompletionError::UnknownEvent`], [`CompletionError::UnknownRank`],
    /// [`CompletionError::DuplicateReport`].
    pub fn report(&self, event: u64, rank: usize, ok: bool) -> Result<Progress, CompletionError> {
        let world_size = self.world_size;
        if rank >= world_size {
            return Err(CompletionError::UnknownRank { event, rank, world_size });
        }
        let open = self.events.get(&event).ok_or(CompletionError::UnknownEvent { event })?;
        let bit = 1 << (rank % 64);
        if open.reported[rank / 64].fetch_or(bit, Ordering::AcqRel) & bit != 0 {
            return Err(CompletionError::DuplicateReport { event, rank, world_size });
        }
        if !ok {
            open.failed.store(true, Ordering::Release);
        }
        if open.missing.fetch_sub(1, Ordering::AcqRel) > 1 {
            return Ok(Progress::Pending);
        }
        self.events.compare_exchange(&event, Some(&open), None);
        Ok(if open.failed.load(Ordering::Acquire) { Progress::Failed } else { Progress::Done })
    }

    /// Events that still wait for a worker.
    pub fn num_open(&self) -> usize {
        self.events.values().count()
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_done_when_the_last_worker_reports() {
        let tracker = CompletionTracker::new(3);
        tracker.open(7).unwrap();
        assert_eq!(tracker.report(7, 2, true), Ok(Progress::Pending));
        assert_eq!(tracker.report(7, 0, true), Ok(Progress::Pending));
        assert_eq!(tracker.num_open(), 1);
        assert_eq!(tracker.report(7, 1, true), Ok(Progress::Done));
        assert_eq!(tracker.num_open(), 0);
    }

    #[test]
    fn one_failure_fails_the_event_but_only_once_all_have_reported() {
        let tracker = CompletionTracker::new(2);
        tracker.open(1).unwrap();
        assert_eq!(tracker.report(1, 0, false), Ok(Progress::Pending));
        assert_eq!(tracker.report(1, 1, true), Ok(Progress::Failed));
    }

    #[test]
    fn wrong_reports_name_event_rank_and_bound_and_change_nothing() {
        let tracker = CompletionTracker::new(2);
        tracker.open(5).unwrap();
        tracker.report(5, 0, true).unwrap();
        assert_eq!(
            tracker.report(5, 0, false),
            Err(CompletionError::DuplicateReport { event: 5, rank: 0, world_size: 2 })
        );
        let stranger = tracker.report(5, 2, true).unwrap_err();
        assert_eq!(stranger.to_string(), "worker 2 reported event 5, but the workers are 0..2");
        assert_eq!(tracker.report(6, 0, true), Err(CompletionError::UnknownEvent { event: 6 }));
        assert_eq!(tracker.open(5), Err(CompletionError::DuplicateEvent { event: 5 }));
        assert_eq!(tracker.report(5, 1, true), Ok(Progress::Done));
        assert_eq!(tracker.report(5, 1, true), Err(CompletionError::UnknownEvent { event: 5 }));
    }

    #[test]
    fn more_workers_than_a_word_has_bits() {
        let tracker = CompletionTracker::new(130);
        tracker.open(0).unwrap();
        for rank in (0..129).rev() {
            assert_eq!(tracker.report(0, rank, true), Ok(Progress::Pending));
        }
        assert_eq!(tracker.report(0, 129, true), Ok(Progress::Done));
    }

    #[test]
    fn threads_decide_each_event_exactly_once() {
        let tracker = CompletionTracker::new(8);
        for event in 0..200 {
            tracker.open(event).unwrap();
        }
        let decided = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for rank in 0..8 {
                let (tracker, decided) = (&tracker, &decided);
                scope.spawn(move || {
                    for event in 0..200 {
                        let progress = tracker.report(event, rank, event % 2 == 0 || rank != 3);
                        if progress != Ok(Progress::Pending) {
                            let expected = [Progress::Done, Progress::Failed][event as usize % 2];
                            assert_eq!(progress, Ok(expected));
                            decided.fetch_add(1, Ordering::Relaxed);
                        }
                    }
                });
            }
        });
        assert_eq!(decided.into_inner(), 200);
        assert_eq!(tracker.num_open(), 0);
    }
}
