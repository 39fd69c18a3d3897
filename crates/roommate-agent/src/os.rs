//! What daemon and machine ask of the operating system, behind one interface: clock, disk and
//! processes. Everything that can fail, delay or stop there goes through [`Os`], so that the same
//! code runs on the real system and, in tests, on a twin with seeded faults in virtual time.
//!
//! ```text
//!  daemon, machine ─▶ Os ─┬─ real: Linux
//!                         └─ twin: virtual time, lost writes, full disks, deaths (tests)
//! ```

pub(crate) mod containers;
pub(crate) mod disk;
pub(crate) mod groups;
pub(crate) mod processes;

pub(crate) use containers::Containers;
pub(crate) use disk::Disk;
pub(crate) use groups::Groups;
pub(crate) use processes::Processes;

use std::path::Path;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

/// The time, as one machine sees it.
pub(crate) trait Clock: Send + Sync {
    /// A time that never runs backwards.
    fn now(&self) -> Instant;
    /// The time of day, in µs since 1970; it may be set, and so may jump.
    fn unix_us(&self) -> u64;
}

/// The operating system of this machine.
#[derive(Clone)]
pub(crate) struct Os {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) disk: Arc<dyn Disk>,
    pub(crate) processes: Arc<dyn Processes>,
}

impl Os {
    /// The real one.
    pub(crate) fn real() -> Self {
        Self::with_supervisor(Path::new(processes::THIS_PROGRAM))
    }

    /// The real one, with another program as the supervisor of jobs.
    pub(crate) fn with_supervisor(program: &Path) -> Self {
        Self {
            clock: Arc::new(RealClock),
            disk: Arc::new(disk::RealDisk),
            processes: Arc::new(processes::RealProcesses { program: program.to_owned() }),
        }
    }

    pub(crate) fn now(&self) -> Instant {
        self.clock.now()
    }

    pub(crate) fn unix_us(&self) -> u64 {
        self.clock.unix_us()
    }
}

impl std::fmt::Debug for Os {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Os")
    }
}

struct RealClock;

impl Clock for RealClock {
    fn now(&self) -> Instant {
        Instant::now()
    }

    fn unix_us(&self) -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
    }
}
