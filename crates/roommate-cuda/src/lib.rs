//! Tests what a process can do on a GPU: how many multiprocessors it sees and runs on, whether an
//! allocation above a limit is refused, whether a kernel gives the right result.
//!
//! It is a separate crate because calling the CUDA driver takes unsafe code, which every other
//! crate of the workspace forbids; all of it is here, small enough to review at once. The driver
//! library is loaded on demand, so the program starts on machines without one.
//!
//! A process that has used a GPU keeps a context on it, and an MPS limit is fixed when a process
//! starts. So the test runs in a short-lived child process, never in a daemon.

mod driver;

use driver::{Driver, Failed};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::ffi::OsString;

/// Results of the self-test of one GPU. A value that was not tested is absent, and `error` has the
/// reason.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Multiprocessors that the driver reports for this process.
    pub sms: Option<u32>,
    /// Groups of [`GRAIN`] multiprocessors to which a running process can be confined.
    pub groups: Option<u32>,
    /// Total GPU memory that the driver reports, in MiB.
    pub total_mib: Option<u64>,
    /// Free GPU memory that the driver reports, in MiB.
    pub free_mib: Option<u64>,
    /// An allocation meant to exceed a memory limit.
    pub over: Option<Tried>,
    /// A small allocation, which must succeed.
    pub small: Option<Tried>,
    /// Result of the test kernel.
    pub kernel: Option<Kernel>,
    /// The first error, which ended the test.
    pub error: Option<String>,
}

/// Result of one test allocation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tried {
    /// Requested size in MiB.
    pub mib: u64,
    /// Reason of the refusal; `None` = the allocation succeeded.
    pub refused: Option<String>,
}

/// Result of the test kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kernel {
    /// Whether its results were correct.
    pub right: bool,
    /// Number of different multiprocessors that its blocks ran on.
    pub on_sms: u32,
}

/// Environment variable that names a substitute for the driver library, for tests.
pub const LIBRARY_VARIABLE: &str = "ROOMMATE_CUDA_LIBRARY";
const LIBRARY: &str = "libcuda.so.1";

/// Number of multiprocessors in the hardware's smallest group for a stream.
pub const GRAIN: u32 = 8;

const SMALL_MIB: u64 = 16;
/// Number of blocks: several times the multiprocessors of any GPU, so that blocks reach all of
/// them.
const BLOCKS: u32 = 4096;
/// Cycles that each block runs: a block that ended at once would free its multiprocessor for the
/// next one.
const CYCLES: u64 = 100_000;

/// Every block writes the multiprocessor it is on and a value that only it would write.
const KERNEL: &std::ffi::CStr = c"
.version 6.4
.target sm_50
.address_size 64

.visible .entry probe(.param .u64 into, .param .u64 cycles)
{
    .reg .pred %again;
    .reg .b32 %block, %sm, %figure;
    .reg .b64 %at, %offset, %start, %now, %stay;
    ld.param.u64 %at, [into];
    ld.param.u64 %stay, [cycles];
    cvta.to.global.u64 %at, %at;
    mov.u32 %block, %ctaid.x;
    mov.u32 %sm, %smid;
    mul.wide.u32 %offset, %block, 8;
    add.u64 %at, %at, %offset;
    mul.lo.u32 %figure, %block, %block;
    add.u32 %figure, %figure, 7;
    st.global.u32 [%at], %sm;
    st.global.u32 [%at+4], %figure;
    mov.u64 %start, %clock64;
LOOP:
    mov.u64 %now, %clock64;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %again, %now, %stay;
    @%again bra LOOP;
    ret;
}
";

/// Tests a GPU, by its number among the visible ones, and tries to allocate `over_mib` MiB (0 = no
/// test of the limit).
pub fn self_test(device: u32, over_mib: u64) -> Report {
    let library = std::env::var_os(LIBRARY_VARIABLE).unwrap_or_else(|| OsString::from(LIBRARY));
    let mut report = Report::default();
    if let Err(error) = look(&library, device, over_mib, &mut report) {
        report.error = Some(error);
    }
    report
}

fn look(
    library: &std::ffi::OsStr,
    device: u32,
    over_mib: u64,
    report: &mut Report,
) -> Result<(), String> {
    let driver = Driver::load(library)?;
    let failed = |what: &'static str| move |e: Failed| format!("could not {what}: {e}");
    driver.init().map_err(failed("start the CUDA driver"))?;
    let gpu = driver.device(device).map_err(failed("find the GPU"))?;
    report.sms = Some(driver.multiprocessors(gpu).map_err(failed("count the SMs"))?);
    report.groups = report.sms.and_then(|sms| driver.groups(gpu, sms, GRAIN));
    let context = driver.context(gpu).map_err(failed("create a context on the GPU"))?;
    let (free, total) = context.memory().map_err(failed("query the GPU's memory"))?;
    (report.free_mib, report.total_mib) = (Some(free >> 20), Some(total >> 20));
    let allocate =
        |mib: u64| Tried { mib, refused: context.allocate(mib << 20).err().map(|e| e.to_string()) };
    report.small = Some(allocate(SMALL_MIB));
    if over_mib > 0 {
        report.over = Some(allocate(over_mib));
    }
    let results = context.run(KERNEL, c"probe", BLOCKS, CYCLES).map_err(failed("run a kernel"))?;
    let figure = |block: usize| (block as u32).wrapping_mul(block as u32).wrapping_add(7);
    report.kernel = Some(Kernel {
        right: results.iter().enumerate().all(|(i, (_, written))| *written == figure(i)),
        on_sms: results.iter().map(|(sm, _)| sm).collect::<BTreeSet<_>>().len() as u32,
    });
    Ok(())
}

#[cfg(test)]
mod tests;
