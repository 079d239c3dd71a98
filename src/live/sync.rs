//! What callers on other threads share with the tasks of an engine, under names of its own: the test build that
//! explores interleavings puts locks of its own here.

#[cfg(not(all(test, standin_shuttle)))]
pub(super) use std::sync::{Mutex, MutexGuard};

#[cfg(all(test, standin_shuttle))]
pub(super) use shuttle::sync::{Mutex, MutexGuard};

/// Has the processor fetch what locking takes. The answer means nothing.
#[inline(always)]
pub(super) fn touch<T>(mutex: &Mutex<T>) -> bool {
    #[cfg(not(all(test, standin_shuttle)))]
    return mutex.is_poisoned();
    #[cfg(all(test, standin_shuttle))]
    {
        let _: &Mutex<T> = mutex;
        false
    }
}

/// A place between two steps at which other threads may have theirs. Nothing, but where interleavings are explored:
/// channels and maps are one step each there.
#[inline(always)]
pub(super) fn others_may_go() {
    #[cfg(all(test, standin_shuttle))]
    shuttle::thread::yield_now();
}
