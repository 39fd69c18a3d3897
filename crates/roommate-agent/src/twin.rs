//! The twin: a machine in memory and in virtual time, on which the real daemon runs with faults
//! that a seed decides. One seed reproduces a failure.
//!
//! ```text
//!  seed ─▶ days of users, tenants, deaths, power cuts, full disks, flipped bits, jumping clocks
//!            │                                    ▲
//!            ▼                                    │ Disk, Processes, Groups, Clock
//!   Daemon::round (real code) ────────────────────┘
//! ```

mod days;
mod disk;
mod processes;
mod services;
mod world;

use crate::os::Clock;
use roommate_core::math::rng::Rng;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Thrown where a daemon dies.
struct Died;

/// What goes wrong for one process.
#[derive(Clone)]
struct Faults(Arc<FaultState>);

struct FaultState {
    calls: AtomicU64,
    /// The call at which the process dies.
    die_at: AtomicU64,
    dead: AtomicBool,
    /// Whether the disk is full, and whether there are no file descriptors or processes left.
    full: Arc<AtomicBool>,
    exhausted: Arc<AtomicBool>,
    rng: Mutex<Rng>,
}

impl Faults {
    fn new(seed: u64, full: &Arc<AtomicBool>, exhausted: &Arc<AtomicBool>) -> Self {
        Self(Arc::new(FaultState {
            calls: AtomicU64::new(0),
            die_at: AtomicU64::new(u64::MAX),
            dead: AtomicBool::new(false),
            full: Arc::clone(full),
            exhausted: Arc::clone(exhausted),
            rng: Mutex::new(Rng::new(seed)),
        }))
    }

    /// A call of the system.
    fn call(&self) -> io::Result<()> {
        if self.0.dead.load(Ordering::Relaxed) {
            // Only destructors run now, and they change nothing.
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        let n = self.0.calls.fetch_add(1, Ordering::Relaxed);
        if n == self.0.die_at.load(Ordering::Relaxed) {
            self.0.dead.store(true, Ordering::Relaxed);
            std::panic::resume_unwind(Box::new(Died));
        }
        Ok(())
    }

    /// A call that needs a file descriptor or a process.
    fn open(&self) -> io::Result<()> {
        self.call()?;
        if self.0.exhausted.load(Ordering::Relaxed) {
            return Err(io::Error::from_raw_os_error(24));
        }
        Ok(())
    }

    /// How many of these bytes can be written.
    fn room(&self, wanted: usize) -> usize {
        if self.0.full.load(Ordering::Relaxed) {
            let mut rng = self.0.rng.lock().unwrap_or_else(PoisonError::into_inner);
            rng.below(wanted as u64 + 1) as usize
        } else {
            wanted
        }
    }

    /// The process dies at the call that comes after this many others.
    fn die_in(&self, calls: u64) {
        let now = self.0.calls.load(Ordering::Relaxed);
        self.0.die_at.store(now + calls, Ordering::Relaxed);
    }
}

/// Virtual time.
#[derive(Clone)]
struct TwinClock(Arc<Times>);

struct Times {
    base: Instant,
    us: AtomicU64,
    /// How far the time of day is off, in µs; it starts in the middle, so that it can be set back.
    off_us: AtomicU64,
}

impl TwinClock {
    fn new() -> Self {
        let off_us = AtomicU64::new(1_800_000_000_000_000);
        Self(Arc::new(Times { base: Instant::now(), us: AtomicU64::new(0), off_us }))
    }

    fn us(&self) -> u64 {
        self.0.us.load(Ordering::Relaxed)
    }

    fn advance_to(&self, us: u64) {
        self.0.us.fetch_max(us, Ordering::Relaxed);
    }

    /// Somebody sets the time of day.
    fn jump(&self, off_us: u64) {
        self.0.off_us.store(off_us, Ordering::Relaxed);
    }
}

impl Clock for TwinClock {
    fn now(&self) -> Instant {
        self.0.base + Duration::from_micros(self.us())
    }

    fn unix_us(&self) -> u64 {
        self.us() + self.0.off_us.load(Ordering::Relaxed)
    }
}
