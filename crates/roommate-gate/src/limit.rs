//! How far the process runs ahead of the GPU while a holder attends.
//!
//! Launches form groups of about [`TARGET_NS`] of GPU time: shorter ones cost the process more,
//! longer ones delay who closes the gate. After each group an event is recorded, and the process
//! waits for an earlier one, so that the groups after it are at most [`AHEAD_NS`] of work, or one
//! group. How long each kernel takes is learned from the times of groups (`cost`): a single kernel
//! of milliseconds is a group of its own.
//!
//! An event tells of its own stream only. A process that launches on several streams in turn has
//! its events on all of them in turn, so that each is limited in the long run.

use crate::cost::Costs;
use crate::driver::{Driver, Handle, Refused};
use crate::gate::{self, Launch};
use roommate_lease::{Leases, now_ns};
use std::cell::UnsafeCell;
use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU16, AtomicU32, AtomicU64, Ordering};

/// GPU time of a group. Measured with training beside a service: groups of 64 small kernels cost
/// nothing, groups of 4 cost 3 to 4 %.
const TARGET_NS: u64 = 700_000;
/// GPU time of the groups that the GPU still has when the process goes on, so that it does not idle
/// until the next one comes; at most that many groups.
const AHEAD_NS: u64 = 1_600_000;
const MOST_GROUPS: usize = 2;
const LARGEST_GROUP: usize = 64;
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
    /// The launches before each event.
    launches: [Group; EVENTS],
    /// Number of events recorded.
    recorded: usize,
    /// The last event that a thread saw happen, by its number and time.
    seen: Option<(usize, u64)>,
}

/// The launches between two events.
#[derive(Clone, Copy)]
struct Group {
    /// Where the costs of its launches are.
    launches: [u16; LARGEST_GROUP],
    count: usize,
    /// What the launches are expected to take together.
    work_ns: u64,
    /// A launch was held meanwhile, so that the GPU may have been idle.
    was_held: bool,
}

impl Group {
    const EMPTY: Self =
        Self { launches: [0; LARGEST_GROUP], count: 0, work_ns: 0, was_held: false };

    /// The launches since the last group, which are counted anew.
    fn take() -> Self {
        let count = (LAUNCHES.swap(0, Ordering::Relaxed) as usize).min(LARGEST_GROUP);
        let work_ns = WORK_NS.swap(0, Ordering::Relaxed);
        let was_held = HELD.swap(false, Ordering::Relaxed);
        let mut group = Self { count, work_ns, was_held, ..Self::EMPTY };
        for (launch, place) in group.launches[..count].iter_mut().zip(&PLACES) {
            *launch = place.load(Ordering::Relaxed);
        }
        group
    }
}

impl Groups {
    const fn new() -> Self {
        Self {
            events: [ptr::null_mut(); EVENTS],
            launches: [Group::EMPTY; EVENTS],
            recorded: 0,
            seen: None,
        }
    }

    /// Ends a group; the event to wait for, and its number.
    fn end(
        &mut self,
        driver: &Driver,
        stream: Handle,
        group: Group,
    ) -> Result<Option<(usize, Handle)>, Refused> {
        let number = self.recorded;
        let event = &mut self.events[number % EVENTS];
        if event.is_null() {
            *event = driver.event()?;
        }
        driver.record(*event, stream)?;
        self.launches[number % EVENTS] = group;
        self.recorded += 1;
        Ok(self.awaited().map(|before| (before, self.events[before % EVENTS])))
    }

    /// The event before the groups that the GPU may still have.
    fn awaited(&self) -> Option<usize> {
        let mut work_ns = 0;
        let is_behind = |(groups, number): &(usize, usize)| {
            work_ns += self.launches[number % EVENTS].work_ns;
            *groups == MOST_GROUPS || *groups > 0 && work_ns > AHEAD_NS
        };
        (0..self.recorded).rev().enumerate().find(is_behind).map(|(_, number)| number)
    }

    /// An event was awaited and has happened. If the one before it was awaited as well, the GPU was
    /// busy in between, with just this group.
    fn happened(&mut self, costs: &Costs, number: usize, now_ns: u64) {
        let before = self.seen.replace((number, now_ns));
        let group = &self.launches[number % EVENTS];
        if let Some((_, then)) = before.filter(|(n, _)| n + 1 == number && !group.was_held) {
            let took_ns = now_ns.saturating_sub(then);
            costs.learn(&group.launches[..group.count], group.work_ns, took_ns);
        }
    }
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

/// Launches since the last event, what they are expected to take, and whether one was held. For all
/// contexts together: nearly all launches of a process are in one, and asking for it costs every
/// launch.
static LAUNCHES: AtomicU32 = AtomicU32::new(0);
static WORK_NS: AtomicU64 = AtomicU64::new(0);
static HELD: AtomicBool = AtomicBool::new(false);
/// Where the costs of these launches are.
static PLACES: [AtomicU16; LARGEST_GROUP] = [const { AtomicU16::new(0) }; LARGEST_GROUP];
static COSTS: Costs = Costs::new();

/// Counts a launch; whether a group ends with it.
pub(crate) fn ends_group(launch: &Launch) -> bool {
    let (place, ns) = COSTS.expect(launch.kernel);
    let before = LAUNCHES.fetch_add(1, Ordering::Relaxed) as usize;
    if let Some(at) = PLACES.get(before) {
        at.store(place, Ordering::Relaxed);
    }
    let work_ns = WORK_NS.fetch_add(ns, Ordering::Relaxed) + ns;
    launch.is_graph || work_ns >= TARGET_NS || before + 1 >= LARGEST_GROUP
}

/// A launch was held.
pub(crate) fn held() {
    HELD.store(true, Ordering::Relaxed);
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
        let group = Group::take();
        groups.end(driver, launch.stream, group).map(|found| (group.count, found))
    });
    // Another thread may end a group at this moment.
    let Some((launches, awaited)) = ended.transpose()? else { return Ok(()) };
    if let Some(entry) = gate::entry(leases) {
        entry.set_group(launches as u32);
    }
    let Some((number, event)) = awaited else { return Ok(()) };
    if wait(driver, leases, event)? {
        state.try_with(|groups| groups.happened(&COSTS, number, now_ns()));
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
    Group::take();
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

    /// From here on a kernel is a long one, ns.
    const LONG: u64 = 2_500_000;

    /// A simulated process that launches these kernels again and again, each as long as it is
    /// named, ns. For every group of the second half: its kernels, and what the GPU still had when
    /// the process went on, ns.
    fn groups_of(kernels: &[u64], launches: usize) -> Vec<(Vec<u64>, u64)> {
        let (costs, mut groups) = (Costs::new(), Groups::new());
        let (mut group, mut of, mut found) = (Group::EMPTY, Vec::new(), Vec::new());
        // When the GPU is done with each group.
        let mut done = vec![0];
        for (n, &kernel) in kernels.iter().cycle().take(launches).enumerate() {
            let (place, ns) = costs.expect(kernel);
            group.launches[group.count] = place;
            (group.count, group.work_ns) = (group.count + 1, group.work_ns + ns);
            of.push(kernel);
            if group.work_ns < TARGET_NS && group.count < LARGEST_GROUP {
                continue;
            }
            groups.launches[groups.recorded % EVENTS] = std::mem::replace(&mut group, Group::EMPTY);
            groups.recorded += 1;
            let end = done.last().unwrap() + of.iter().sum::<u64>();
            done.push(end);
            let of = std::mem::take(&mut of);
            let Some(before) = groups.awaited() else { continue };
            groups.happened(&costs, before, done[before + 1]);
            if 2 * n > launches {
                found.push((of, end - done[before + 1]));
            }
        }
        found
    }

    #[test]
    fn a_group_takes_about_its_target() {
        for kernel in [20_000, 50_000, 100_000, 150_000] {
            for (of, with_gpu) in groups_of(&[kernel], 4_000) {
                let took: u64 = of.iter().sum();
                assert!((550_000..=900_000).contains(&took), "{kernel}: {took}");
                assert!(with_gpu <= AHEAD_NS + took, "{kernel}: {with_gpu}");
            }
        }
    }

    #[test]
    fn groups_have_a_largest_size() {
        assert_eq!(groups_of(&[1_000], 8_000)[0].0.len(), LARGEST_GROUP);
        assert_eq!(groups_of(&[100_000_000], 200)[0].0.len(), 1);
    }

    #[test]
    fn long_kernels_among_short_ones_are_groups_of_their_own() {
        // What an output layer looks like: a few long kernels at the end of each step.
        let mut kernels: Vec<u64> = (0..400).map(|i| 20_000 + 100 * (i % 40)).collect();
        kernels.extend((0..8).map(|i| LONG + i));
        for (of, with_gpu) in groups_of(&kernels, 20 * kernels.len()) {
            let long = of.iter().filter(|k| **k >= LONG).count();
            assert!(long <= 1, "{long} long kernels in a group");
            assert!(with_gpu <= LONG + 8 + TARGET_NS, "{with_gpu}");
        }
    }

    #[test]
    fn only_awaited_neighbours_say_how_long_a_group_took() {
        let (costs, mut groups) = (Costs::new(), Groups::new());
        let (place, first) = costs.expect(7);
        let mut group = Group { count: 16, work_ns: 16 * first, ..Group::EMPTY };
        group.launches[..16].fill(place);
        groups.launches = [group; EVENTS];
        groups.launches[5].was_held = true;
        groups.happened(&costs, 1, 1_000_000);
        assert_eq!(costs.expect(7).1, first, "when the first one began is not known");
        groups.happened(&costs, 3, 9_000_000);
        assert_eq!(costs.expect(7).1, first, "one between them was not awaited");
        groups.happened(&costs, 4, 9_000_000 + 32 * first);
        let learned = costs.expect(7).1;
        assert!(learned.abs_diff(2 * first) <= 1, "{learned}");
        groups.happened(&costs, 5, 90_000_000);
        assert_eq!(costs.expect(7).1, learned, "the GPU idled while a launch was held");
    }
}
