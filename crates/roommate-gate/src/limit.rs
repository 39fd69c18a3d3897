//! How far the process runs ahead of the GPU while a holder attends.
//!
//! Launches form groups. After each group an event is recorded, and the process waits for the
//! event [`LAG`] groups before: at most one group more is with the GPU. A group shall take the GPU
//! about [`TARGET_NS`]: shorter ones cost the process more, longer ones delay who closes the gate.
//!
//! An event tells of its own stream only. A process that launches on several streams in turn has
//! its events on all of them in turn, so that each is limited in the long run.

use crate::driver::{Driver, Handle, Refused};
use crate::gate::{self, Launch};
use roommate_lease::{Leases, now_ns};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU32, Ordering};

/// GPU time of a group. Measured with training beside a service: groups of 64 small kernels cost
/// nothing, groups of 4 cost 3 to 4 %.
const TARGET_NS: f64 = 0.7e6;
/// Groups that the GPU still has when the process goes on, so that it does not idle until the next
/// one comes.
const LAG: usize = 2;
const FIRST_GROUP: f64 = 16.0;
const SMALLEST_GROUP: f64 = 4.0;
const LARGEST_GROUP: f64 = 64.0;
/// The longest wait for the GPU. A kernel may take longer, or wait for another launch.
const MOST_WAIT_NS: u64 = 1_000_000_000;
/// Contexts that are limited; a process has one for each GPU.
const CONTEXTS: usize = 8;
/// Events in turn. Two would do for one thread; with more, an event is rarely recorded again while
/// another thread still waits for it, which would only make that thread wait longer.
const EVENTS: usize = 8;

static STATES: [State; CONTEXTS] = [const { State::new() }; CONTEXTS];

/// What is known of one context.
struct State {
    /// The context; null = not in use yet.
    context: AtomicPtr<std::ffi::c_void>,
    /// The driver refused a call of ours: launches in this context are not limited any more.
    is_off: AtomicBool,
    /// Whether a thread has the groups. Others do not wait for it but go on.
    is_taken: AtomicBool,
    groups: UnsafeCell<Groups>,
}

// SAFETY: `groups` is used only by the thread that has set `is_taken`.
unsafe impl Sync for State {}

struct Groups {
    events: [Handle; EVENTS],
    /// Kernels of the group before each event; 0 = a graph, which says nothing of kernels.
    sizes: [u32; EVENTS],
    /// Number of events recorded.
    recorded: usize,
    /// The last event that a thread saw happen, by its number and time.
    seen: Option<(usize, u64)>,
    /// The size of groups before rounding.
    size: f64,
}

impl Groups {
    const fn new() -> Self {
        Self {
            events: [ptr::null_mut(); EVENTS],
            sizes: [0; EVENTS],
            recorded: 0,
            seen: None,
            size: FIRST_GROUP,
        }
    }

    /// Ends a group of this many kernels; the event of the group before, and its number.
    fn end(
        &mut self,
        driver: &Driver,
        stream: Handle,
        size: u32,
    ) -> Result<Option<(usize, Handle)>, Refused> {
        let number = self.recorded;
        let event = &mut self.events[number % EVENTS];
        if event.is_null() {
            *event = driver.event()?;
        }
        driver.record(*event, stream)?;
        self.sizes[number % EVENTS] = size;
        self.recorded += 1;
        Ok(number.checked_sub(LAG).map(|before| (before, self.events[before % EVENTS])))
    }

    /// An event was awaited and has happened. If the one before it was awaited as well, the GPU was
    /// busy in between, with just this group.
    fn happened(&mut self, number: usize, now_ns: u64) {
        let before = self.seen.replace((number, now_ns));
        let size = self.sizes[number % EVENTS];
        if let Some((_, then)) = before.filter(|(n, _)| n + 1 == number && size > 0) {
            self.size = next_size(self.size, size, now_ns.saturating_sub(then));
        }
    }
}

/// The size of the next groups, after a group of this many kernels took the GPU this long. A
/// quarter of the way, and at most by half or twice of it: one long kernel says little.
fn next_size(size: f64, kernels: u32, took_ns: u64) -> f64 {
    let wanted = f64::from(kernels) * TARGET_NS / (took_ns.max(1) as f64);
    let wanted = wanted.clamp(size / 2.0, size * 2.0);
    (size + (wanted - size) / 4.0).clamp(SMALLEST_GROUP, LARGEST_GROUP)
}

impl State {
    const fn new() -> Self {
        Self {
            context: AtomicPtr::new(ptr::null_mut()),
            is_off: AtomicBool::new(false),
            is_taken: AtomicBool::new(false),
            groups: UnsafeCell::new(Groups::new()),
        }
    }

    /// The state of a context; `None` if there are too many.
    fn of(context: Handle) -> Option<&'static Self> {
        STATES.iter().find(|state| {
            let (yes, no) = (Ordering::AcqRel, Ordering::Acquire);
            match state.context.load(Ordering::Acquire) {
                found if found == context => true,
                found if !found.is_null() => false,
                found => match state.context.compare_exchange(found, context, yes, no) {
                    Ok(_) => true,
                    Err(now) => now == context,
                },
            }
        })
    }

    /// Does something with the groups, unless another thread is just doing so.
    fn try_with<T>(&self, what: impl FnOnce(&mut Groups) -> T) -> Option<T> {
        let (yes, no) = (Ordering::Acquire, Ordering::Relaxed);
        self.is_taken.compare_exchange(false, true, yes, no).ok()?;
        // SAFETY: this thread has set `is_taken`, and gives the reference back before it clears it.
        let done = what(unsafe { &mut *self.groups.get() });
        self.is_taken.store(false, Ordering::Release);
        Some(done)
    }
}

/// Launches since the last event, and after how many the next one is due. For all contexts
/// together: nearly all launches of a process are in one, and asking for it costs every launch.
static LAUNCHES: AtomicU32 = AtomicU32::new(0);
static GROUP: AtomicU32 = AtomicU32::new(FIRST_GROUP as u32);

/// Counts a launch; whether a group ends with it.
pub(crate) fn ends_group(launch: &Launch) -> bool {
    let launches = LAUNCHES.fetch_add(1, Ordering::Relaxed) + 1;
    launch.is_graph || launches >= GROUP.load(Ordering::Relaxed)
}

/// Called after a launch that ends a group, on a stream that does not capture: waits if the process
/// is too far ahead.
pub(crate) fn group_ended(driver: &Driver, leases: &'static Leases, launch: &Launch) {
    let Some(state) = driver.current().ok().and_then(State::of) else { return };
    if state.is_off.load(Ordering::Relaxed) {
        return;
    }
    let limited = driver.relaxed(|| limit(driver, leases, launch, state));
    if limited.is_err() {
        state.is_off.store(true, Ordering::Relaxed);
    }
}

fn limit(
    driver: &Driver,
    leases: &'static Leases,
    launch: &Launch,
    state: &State,
) -> Result<(), Refused> {
    let ended = state.try_with(|groups| {
        let kernels = LAUNCHES.swap(0, Ordering::Relaxed);
        groups.end(driver, launch.stream, if launch.is_graph { 0 } else { kernels })
    });
    // Another thread ends a group at this moment, or this is the first one.
    let Some((number, event)) = ended.transpose()?.flatten() else { return Ok(()) };
    if !wait(driver, leases, event)? {
        return Ok(());
    }
    let size = state.try_with(|groups| {
        groups.happened(number, now_ns());
        groups.size
    });
    if let Some(size) = size {
        GROUP.store(size as u32, Ordering::Relaxed);
        if let Some(entry) = gate::entry(leases) {
            entry.set_group(size as u32);
        }
    }
    Ok(())
}

/// Waits for an event, for a bounded time and only while a holder attends; whether it had to be
/// awaited and happened. Nothing is held meanwhile.
fn wait(driver: &Driver, leases: &Leases, event: Handle) -> Result<bool, Refused> {
    if driver.has_happened(event)? {
        return Ok(false);
    }
    let start = now_ns();
    loop {
        gate::sleep();
        if driver.has_happened(event)? {
            return Ok(true);
        }
        let now = now_ns();
        if now.saturating_sub(start) > MOST_WAIT_NS || !leases.is_attended(now) {
            return Ok(false);
        }
    }
}

/// Starts anew in a forked child, which has one thread. The parent's contexts and events are not
/// the child's.
pub(crate) fn forget() {
    LAUNCHES.store(0, Ordering::Relaxed);
    GROUP.store(FIRST_GROUP as u32, Ordering::Relaxed);
    for state in &STATES {
        state.context.store(ptr::null_mut(), Ordering::Relaxed);
        state.is_off.store(false, Ordering::Relaxed);
        // A thread of the parent's may have had it.
        state.is_taken.store(false, Ordering::Relaxed);
        state.try_with(|groups| *groups = Groups::new());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The size after many groups of kernels of this length.
    fn settled(kernel_us: f64) -> f64 {
        let next = |size: f64, _| {
            let kernels = size as u32;
            next_size(size, kernels, (f64::from(kernels) * kernel_us * 1e3) as u64)
        };
        (0..100).fold(FIRST_GROUP, next)
    }

    #[test]
    fn a_group_takes_about_its_target() {
        for kernel_us in [20.0, 50.0, 100.0, 150.0] {
            let took_us = settled(kernel_us).floor() * kernel_us;
            assert!((550.0..=850.0).contains(&took_us), "{kernel_us}: {took_us}");
        }
    }

    #[test]
    fn groups_have_a_smallest_and_a_largest_size() {
        assert_eq!(settled(1.0), LARGEST_GROUP);
        assert_eq!(settled(1e5), SMALLEST_GROUP);
        for (kernels, took) in [(1, 0), (0, 0), (u32::MAX, 1), (1, u64::MAX)] {
            let size = next_size(FIRST_GROUP, kernels, took);
            assert!((8.0..=32.0).contains(&size), "one strange group changes little: {size}");
        }
    }

    #[test]
    fn only_awaited_neighbours_say_how_long_a_group_took() {
        let mut groups = Groups::new();
        groups.sizes = [16, 16, 16, 16, 16, 0, 16, 16];
        groups.happened(1, 1_000_000);
        assert_eq!(groups.size, FIRST_GROUP, "when the first one began is not known");
        groups.happened(3, 9_000_000);
        assert_eq!(groups.size, FIRST_GROUP, "one between them was not awaited");
        groups.happened(4, 11_000_000);
        assert_eq!(groups.size, 14.0, "2 ms: at most by half, a quarter of the way");
        groups.happened(5, 40_000_000);
        assert_eq!(groups.size, 14.0, "a graph says nothing of kernels");
    }
}
