//! What happens at each launch.

use crate::driver::{Code, Handle, SUCCESS, driver};
use crate::once::Once;
use crate::{leases, limit};
use roommate_lease::{Entry, Leases, now_ns};

/// Time between two looks at a closed gate or at an event. A shorter one would keep a core busy;
/// a longer one would delay the first launch after opening.
const POLL_NS: i64 = 50_000;

/// Where this process counts. Made at the first launch, so that a process that never launches is
/// not listed.
static ENTRY: Once<Entry<'static>> = Once::new();

pub(crate) fn entry(leases: &'static Leases) -> Option<&'static Entry<'static>> {
    ENTRY.get(|| leases.enter(std::process::id()))
}

pub(crate) fn forget() {
    ENTRY.forget();
}

/// One launch of the program's.
pub(crate) struct Launch {
    /// The stream, as a handle that means the same in all functions of the driver.
    pub(crate) stream: Handle,
    /// Whether it is a graph, which may be as much work as many kernels.
    pub(crate) is_graph: bool,
    /// What is launched: equal for launches that take about as long.
    pub(crate) kernel: u64,
}

/// Lets a launch pass, sooner or later.
#[inline]
pub(crate) fn pass(launch: &Launch, call: impl FnOnce() -> Code) -> Code {
    let Some(leases) = leases() else { return call() };
    if let Some(entry) = entry(leases) {
        entry.launched();
    }
    // Nearly always so: no lease of any kind, and no need to know what time it is.
    if leases.is_unused() { call() } else { pass_leased(leases, launch, call) }
}

#[inline(never)]
fn pass_leased(leases: &'static Leases, launch: &Launch, call: impl FnOnce() -> Code) -> Code {
    let now = now_ns();
    let is_closed = leases.is_closed(now);
    if !is_closed && !leases.is_attended(now) {
        return call();
    }
    let ends_group = limit::ends_group(launch);
    if !is_closed && !ends_group {
        return call();
    }
    // Who cannot ask whether the stream captures must neither wait nor record.
    let Some(driver) = driver().filter(|d| !d.may_capture(launch.stream)) else { return call() };
    let now = if is_closed { hold(leases, now) } else { now };
    let code = call();
    if code == SUCCESS && ends_group && leases.is_attended(now) {
        limit::group_ended(driver, leases, launch);
    }
    code
}

/// Waits until the gate is open; what time it is then.
fn hold(leases: &'static Leases, since_ns: u64) -> u64 {
    let mut now = since_ns;
    while leases.is_closed(now) {
        sleep();
        now = now_ns();
    }
    limit::held();
    if let Some(entry) = entry(leases) {
        entry.held(now.saturating_sub(since_ns));
    }
    now
}

/// Sleeps until the next look, or until a signal.
pub(crate) fn sleep() {
    let time = libc::timespec { tv_sec: 0, tv_nsec: POLL_NS };
    // SAFETY: reads one time, and writes nothing.
    unsafe { libc::nanosleep(&raw const time, std::ptr::null_mut()) };
}
