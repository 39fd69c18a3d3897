//! A gate in front of the kernel launches of a process, as a library that is loaded into it before
//! all others (`LD_PRELOAD=libroommate_gate.so ROOMMATE_GATE=/path/of/lease/file`). The program
//! needs no change and does not know of it.
//!
//! While a holder (the front of a service, the daemon) has closed the lease file, launches wait.
//! While a holder attends, the process runs ahead of the GPU by a few launches only, so that
//! closing takes effect at once instead of after everything that was already handed to the driver.
//! Otherwise a launch is counted and goes on. Copies and memory operations are not held.
//!
//! Rules:
//! - It never breaks the process. Without the variable, or if the file cannot be opened, programs
//!   get the driver's own functions. A driver error in a call of ours switches the limit off for
//!   that context; results of the program's calls are never changed.
//! - It never waits for ever: leases are bounded, and so is every wait for the GPU.
//! - It never waits inside a capture: what is captured into a graph runs later.
//! - No thread waits for another thread's turn here.
//!
//! All processes of a gang must be gated by the same file, or none: a rank that is held makes the
//! others wait inside their collectives, with kernels that occupy their GPUs. Whoever sets
//! `LD_PRELOAD` decides that; this library cannot know of other ranks.
//!
//! What it does not see: libraries loaded with `RTLD_DEEPBIND` or into another link namespace,
//! programs that link the C library statically, and launches by functions that no current library
//! uses (`cuLaunch`, `cuLaunchGrid`, `cuLaunchCooperativeKernelMultiDevice`). Their launches go on
//! as if there were no gate.

#[cfg(not(all(target_os = "linux", target_env = "gnu")))]
compile_error!("finding the real dlsym needs the dynamic linker of glibc");

mod cost;
mod driver;
mod find;
mod gate;
mod limit;
mod once;
mod wrap;

use roommate_lease::Leases;
use std::path::Path;
use std::sync::atomic::{AtomicPtr, Ordering};

/// Environment variable with the path of the lease file.
const VARIABLE: &str = "ROOMMATE_GATE";

/// The lease file; null = there is none, and the library does nothing. Set before the program
/// starts and never taken away, so that no thread ever waits for it to be opened.
static LEASES: AtomicPtr<Leases> = AtomicPtr::new(std::ptr::null_mut());

fn leases() -> Option<&'static Leases> {
    // SAFETY: null, or leaked by `start`.
    unsafe { LEASES.load(Ordering::Acquire).as_ref() }
}

/// Runs when the library is loaded, before the program: there is one thread, and nobody changes
/// the environment meanwhile.
extern "C" fn start() {
    let Some(path) = std::env::var_os(VARIABLE).filter(|p| !p.is_empty()) else { return };
    let Ok(leases) = Leases::open(Path::new(&path)) else { return };
    // SAFETY: the handler only stores to atomics, which is allowed in a child of a process with
    // several threads.
    if unsafe { libc::pthread_atfork(None, None, Some(in_child)) } == 0 {
        LEASES.store(Box::into_raw(Box::new(leases)), Ordering::Release);
    }
}

#[used]
#[unsafe(link_section = ".init_array")]
static START: extern "C" fn() = start;

/// A forked child counts for itself, and knows nothing of its parent's contexts.
unsafe extern "C" fn in_child() {
    gate::forget();
    limit::forget();
    driver::forget();
}
