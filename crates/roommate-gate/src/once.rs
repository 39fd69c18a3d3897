//! A value made when it is first needed, without anybody waiting while it is made.

use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU8, Ordering};

const NEW: u8 = 0;
const BEING_MADE: u8 = 1;
const DONE: u8 = 2;

/// Like `OnceLock`, except that a thread that comes while another one makes the value goes on
/// without it, and that a forked child can start anew, whatever the parent's threads were doing.
pub(crate) struct Once<T> {
    state: AtomicU8,
    value: AtomicPtr<T>,
}

impl<T: Sync + 'static> Once<T> {
    pub(crate) const fn new() -> Self {
        Self { state: AtomicU8::new(NEW), value: AtomicPtr::new(ptr::null_mut()) }
    }

    /// The value; `None` if it could not be made, or is just being made.
    #[inline]
    pub(crate) fn get(&self, make: impl FnOnce() -> Option<T>) -> Option<&'static T> {
        let value = self.value.load(Ordering::Acquire);
        if value.is_null() { self.make(make) } else { Self::leaked(value) }
    }

    fn leaked(value: *mut T) -> Option<&'static T> {
        // SAFETY: null, or leaked by `make`.
        unsafe { value.as_ref() }
    }

    #[cold]
    fn make(&self, make: impl FnOnce() -> Option<T>) -> Option<&'static T> {
        let (yes, no) = (Ordering::Acquire, Ordering::Relaxed);
        if self.state.compare_exchange(NEW, BEING_MADE, yes, no).is_err() {
            return None;
        }
        let value = make().map_or(ptr::null_mut(), |value| Box::into_raw(Box::new(value)));
        self.value.store(value, Ordering::Release);
        self.state.store(DONE, Ordering::Release);
        Self::leaked(value)
    }

    /// The next `get` makes it again. For a process with one thread.
    pub(crate) fn forget(&self) {
        self.value.store(ptr::null_mut(), Ordering::Release);
        self.state.store(NEW, Ordering::Release);
    }
}
