//! Leases in a file in shared memory, by which holders (the fronts of services, the daemon) close
//! a gate in front of the kernel launches of other processes.
//!
//! A lease is a time of the monotonic clock in an atomic word: the gate is closed until then. A
//! holder that dies, even by SIGKILL, therefore opens the gate by itself when its lease ends, and
//! nobody has to find out that it died. Nobody waits for anybody else to write: a reader looks at
//! the words, a holder writes its own.
//!
//! A holder closes for at most [`MOST_CLOSE`] and renews its lease while it wants the gate closed.
//! A reader does not believe a time further away than [`MOST_LEASE`], so that a broken writer or a
//! file from before a restart of the machine cannot stop training for ever.
//!
//! The file is one page: a header, a cache line for each holder, and a cache line for each process
//! whose launches pass through a gate (the crate `roommate-gate`). Two processes that write never
//! share a cache line.
//!
//! Both sides must see the same monotonic clock, so they must be in one time namespace, which is
//! so unless someone made another one on purpose.
//!
//! It is a separate crate because a mapped file takes unsafe code, and because the gate, which is
//! loaded into processes of others, must bring along as little as possible.

mod page;

use page::{Counts, Page, Words};
use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

/// Number of holders that a file has room for.
pub const HOLDERS: usize = 16;

/// Number of gated processes that a file has room for; more are gated but not listed.
pub const ENTRIES: usize = 47;

/// The longest time for which [`Holder::close`] closes. Whoever needs more renews the lease, so
/// that a holder that dies holds others up for no longer than this.
pub const MOST_CLOSE: Duration = Duration::from_millis(200);

/// The longest time for which [`Holder::attend`] attends. Attending costs a process little, so this
/// may be longer.
pub const MOST_ATTEND: Duration = Duration::from_secs(10);

/// A lease that ends later than this from now is invalid: the gate is open.
pub const MOST_LEASE: Duration = Duration::from_secs(1);

/// A lease file, mapped into memory.
pub struct Leases {
    page: page::Mapped,
}

impl Leases {
    /// Opens the file at `path`, or creates it, readable and writable for its owner only. What is
    /// there but is not a valid lease file is replaced.
    ///
    /// A file is replaced as a whole and never truncated: a process that has mapped the old one
    /// would be ended by a signal. It goes on with the old file, in which nobody closes.
    pub fn create(path: &Path) -> io::Result<Self> {
        Ok(Self { page: page::create(path)? })
    }

    /// Opens an existing file. The error says what is wrong with it.
    pub fn open(path: &Path) -> io::Result<Self> {
        Ok(Self { page: page::open(path)? })
    }

    fn page(&self) -> &Page {
        self.page.get()
    }

    /// The holder with this number; `None` if there is no such number. Each number must be used by
    /// one holder only: whoever writes last wins.
    pub fn holder(&self, slot: usize) -> Option<Holder<'_>> {
        self.page().holders.get(slot).map(|words| Holder { words })
    }

    /// Whether some holder has closed the gate.
    pub fn is_closed(&self, now_ns: u64) -> bool {
        self.page().holders.iter().any(|h| in_force(&h.closed_until, now_ns, MOST_LEASE))
    }

    /// Whether some holder attends: processes shall limit how far they run ahead of the GPU.
    pub fn is_attended(&self, now_ns: u64) -> bool {
        self.page().holders.iter().any(|h| in_force(&h.attended_until, now_ns, MOST_ATTEND))
    }

    /// Whether no holder has a lease of any kind, not even one that ended. What the gate asks at
    /// every launch, because it needs no clock.
    pub fn is_unused(&self) -> bool {
        let either = |w: &Words| w.closed_until.load(Relaxed) | w.attended_until.load(Relaxed);
        self.page().holders.iter().fold(0, |all, w| all | either(w)) == 0
    }

    /// The living processes whose launches pass through a gate on this file. A process is listed
    /// once it has launched something.
    pub fn gated(&self) -> Vec<Gated> {
        self.entered().into_iter().filter(|g| is_alive(g.pid)).collect()
    }

    /// The same with processes that have ended, as long as nobody else took their entries.
    pub fn entered(&self) -> Vec<Gated> {
        let entries = self.page().entries.iter();
        let listed = entries.map(|e| (e.pid.load(Relaxed), e));
        listed.filter(|(pid, _)| *pid > 0).map(|(pid, e)| e.read(pid)).collect()
    }

    /// An entry for a process to count in, for the gate; `None` if all are taken by living
    /// processes. Entries of processes that are gone are taken again. The process's own entry, if
    /// it has one already, is returned with its counts at zero.
    ///
    /// A process calls it once: two calls at the same moment may take two entries.
    pub fn enter(&self, pid: u32) -> Option<Entry<'_>> {
        let entries = &self.page().entries;
        let own = entries.iter().find(|e| e.pid.load(Relaxed) == pid);
        let taken = own.or_else(|| {
            entries.iter().find(|e| {
                let old = e.pid.load(Relaxed);
                // A process of another PID namespace looks gone. Then two count in one entry,
                // which spoils the counts and nothing else.
                !is_alive(old) && e.pid.compare_exchange(old, pid, Relaxed, Relaxed).is_ok()
            })
        });
        taken.map(|counts| {
            counts.clear();
            Entry { counts }
        })
    }
}

/// One holder's leases.
#[derive(Clone, Copy)]
pub struct Holder<'a> {
    words: &'a Words,
}

impl Holder<'_> {
    /// Makes gated processes limit how far they run ahead of the GPU, so that closing takes effect
    /// at once, from now for this long, at most [`MOST_ATTEND`]. Replaces the time set before.
    pub fn attend(&self, for_: Duration) {
        self.words.attended_until.store(until(now_ns(), for_, MOST_ATTEND), Relaxed);
    }

    /// Closes the gate from now for this long, at most [`MOST_CLOSE`]. Replaces the time set
    /// before: a shorter time opens earlier.
    pub fn close(&self, for_: Duration) {
        self.words.closed_until.store(until(now_ns(), for_, MOST_CLOSE), Relaxed);
    }

    /// Opens the gate at once, as far as this holder is concerned.
    pub fn open(&self) {
        self.words.closed_until.store(NEVER, Relaxed);
    }

    /// Opens the gate and no longer attends.
    pub fn leave(&self) {
        self.open();
        self.words.attended_until.store(NEVER, Relaxed);
    }
}

/// A process whose launches pass through a gate.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Gated {
    /// The process.
    pub pid: u32,
    /// Launches so far, of kernels and of graphs.
    pub launches: u64,
    /// Total time for which launches were held because the gate was closed.
    pub held: Duration,
    /// Number of launches that were held.
    pub holds: u64,
    /// Launches between two events by which the process knows how far the GPU is; 0 = it was never
    /// attended.
    pub group: u32,
}

/// Where a gated process counts.
#[derive(Clone, Copy)]
pub struct Entry<'a> {
    counts: &'a Counts,
}

impl Entry<'_> {
    /// Counts a launch.
    pub fn launched(&self) {
        self.counts.launches.fetch_add(1, Relaxed);
    }

    /// Counts a launch that was held for this long.
    pub fn held(&self, ns: u64) {
        self.counts.held_ns.fetch_add(ns, Relaxed);
        self.counts.holds.fetch_add(1, Relaxed);
    }

    /// Sets the number of launches between two events.
    pub fn set_group(&self, launches: u32) {
        self.counts.group.store(launches, Relaxed);
    }
}

/// The monotonic clock in nanoseconds, the same for all processes of a machine.
pub fn now_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one time. It cannot fail for this clock; a zero would be open.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    (time.tv_sec as u64).wrapping_mul(1_000_000_000).wrapping_add(time.tv_nsec as u64)
}

/// The word of a holder without a lease, which a new file is full of.
const NEVER: u64 = 0;

/// The word of a lease from now for this long, at most `most`.
fn until(now_ns: u64, for_: Duration, most: Duration) -> u64 {
    // Never the word for no lease, should the clock wrap around just there.
    now_ns.wrapping_add(for_.min(most).as_nanos() as u64).max(NEVER + 1)
}

/// Whether a lease has neither ended nor ends too far away to be believed. By difference, so that
/// it holds across a wrap-around of the clock.
fn in_force(word: &AtomicU64, now_ns: u64, most: Duration) -> bool {
    let word = word.load(Relaxed);
    let left = word.wrapping_sub(now_ns);
    word != NEVER && left != 0 && left <= most.as_nanos() as u64
}

/// Whether there is such a process; one of another user counts.
fn is_alive(pid: u32) -> bool {
    let Some(pid) = i32::try_from(pid).ok().filter(|pid| *pid > 0) else { return false };
    // SAFETY: the signal 0 is never delivered; the call only says whether there is such a process.
    let found = unsafe { libc::kill(pid, 0) };
    found == 0 || io::Error::last_os_error().raw_os_error() != Some(libc::ESRCH)
}

#[cfg(test)]
mod tests;
