//! The synchronisation primitives of the crate, from `std` or, under
//! `--cfg loom`, from loom, which runs a test in every interleaving.

#[cfg(loom)]
pub use loom::sync::atomic;
#[cfg(not(loom))]
pub use std::sync::atomic;

use std::sync::Arc;

/// A place that holds an `Arc` and lets threads replace it by compare and exchange.
///
/// Readers and writers never block each other: outside loom this is
/// [`arc_swap::ArcSwap`], which is lock-free.
#[cfg(not(loom))]
pub struct SwapCell<T>(arc_swap::ArcSwap<T>);

#[cfg(not(loom))]
impl<T> SwapCell<T> {
    /// A cell that holds `value`.
    pub fn new(value: Arc<T>) -> Self {
        Self(arc_swap::ArcSwap::new(value))
    }

    /// The value held now.
    pub fn load(&self) -> Arc<T> {
        self.0.load_full()
    }

    /// Replaces `current` by `next`; `false` if the cell holds another value by now.
    pub fn compare_exchange(&self, current: &Arc<T>, next: Arc<T>) -> bool {
        Arc::ptr_eq(&self.0.compare_and_swap(current, next), current)
    }
}

/// The model of the cell that loom explores: a pointer that is read and
/// replaced in one step each. The lock only tells loom where steps begin and end.
#[cfg(loom)]
pub struct SwapCell<T>(loom::sync::Mutex<Arc<T>>);

#[cfg(loom)]
impl<T> SwapCell<T> {
    /// A cell that holds `value`.
    pub fn new(value: Arc<T>) -> Self {
        Self(loom::sync::Mutex::new(value))
    }

    /// The value held now.
    pub fn load(&self) -> Arc<T> {
        self.0.lock().unwrap().clone()
    }

    /// Replaces `current` by `next`; `false` if the cell holds another value by now.
    pub fn compare_exchange(&self, current: &Arc<T>, next: Arc<T>) -> bool {
        let mut held = self.0.lock().unwrap();
        let same = Arc::ptr_eq(&held, current);
        if same {
            *held = next;
        }
        same
    }
}
