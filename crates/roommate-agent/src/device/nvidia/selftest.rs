//! The self-test of a GPU: a child process limited to half of the SMs and a gibibyte of memory
//! tries to use more of both, once with MPS and once without.
//!
//! The limits are set at the MPS control, and the child has no variables that lower them: so they
//! hold for a process that does not want them. Where they do not, limits by variables are tested.

use super::bounded_command;
use super::mps::Mps;
use super::mps::limits::Limit;
use super::nvml::GpuInfo;
use crate::device::Tier;
use roommate_cuda::Report;
use roommate_lease::Leases;
use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// The result of a GPU's self-test.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Found {
    /// The tier in force.
    pub(crate) tier: Tier,
    /// Whether a process can use the GPU at all.
    pub(crate) usable: bool,
    /// The measurements as a sentence.
    pub(crate) what: String,
    /// Groups of SMs to which a running process can be confined.
    pub(crate) groups: u32,
    /// Mechanisms that are available but were not tested and are not used.
    pub(crate) untested: Vec<String>,
    /// Whether limits that are set at the MPS control hold.
    pub(crate) control: Control,
    /// Whether kernel launches can be held back.
    pub(crate) gated: bool,
}

/// What is known of limits that are set at the MPS control.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Control {
    /// They hold; the control limits nobody now.
    Holds,
    /// They are not tested, because jobs use the MPS daemon already.
    Untested,
    /// They do not hold.
    #[default]
    Fails,
}

/// The limits of the process, and what it tries to use.
const LIMIT_MIB: u32 = 1024;
const WANTED_MIB: u64 = 2048;
const PERCENT: u32 = 50;
/// SMs are assigned in groups, so half may be a few more than half.
const ALLOWED_PERCENT: u32 = 60;
/// Creating a context on a machine with many GPUs takes seconds; a driver that hangs never returns.
const PATIENCE: Duration = Duration::from_secs(60);
/// First driver version with MPS v3, which has limits for groups of processes.
const MPS_V3_DRIVER: u32 = 615;

/// Tests a GPU with `program`, which is this program. `mps` is started if it does not run. `gate`:
/// the library that holds back kernel launches, and a folder for a file.
pub(crate) fn test(
    program: &Path,
    gpu: &GpuInfo,
    mps: Option<&Mps>,
    gate: Option<(&Path, &Path)>,
) -> Found {
    let plain = look(program, gpu, None, false, &[]);
    let mut found = match mps.map(|mps| (mps, mps.ensure())) {
        Some((mps, Ok(_))) => test_mps(program, gpu, mps, &plain),
        Some((_, Err(e))) => judge(&plain, None, Some(e)),
        None => judge(&plain, None, Some("MPS is not used".into())),
    };
    if let (Some(mps), Tier::MpsV2, Some((library, folder))) = (mps, found.tier, gate) {
        let tried = test_gate(program, gpu, mps, library, &folder.join("gate-test"));
        found.gated = tried.is_ok();
        found.what = match tried {
            Ok(waited) => {
                format!("{}; a kernel launch that was held back waited {waited} ms", found.what)
            }
            Err(e) => format!("{}; kernel launches cannot be held back: {e}", found.what),
        };
    }
    let controllers =
        std::fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    Found { untested: untested(gpu, &controllers), ..found }
}

/// For how long the self-test holds a launch back, and what it has to wait at least.
const HOLD: Duration = Duration::from_millis(100);
const LEAST_HELD: Duration = Duration::from_millis(80);
/// How often the lease of the self-test is renewed.
const RENEW: Duration = Duration::from_millis(10);

/// Holds back the first kernel launch of a child process with the library; for how long it waited,
/// in milliseconds, or why launches cannot be held back.
fn test_gate(
    program: &Path,
    gpu: &GpuInfo,
    mps: &Mps,
    library: &Path,
    file: &Path,
) -> Result<u128, String> {
    let failed = |e: std::io::Error| format!("{}: {e}", file.display());
    // A file of an earlier test has the counts of that one.
    let _ = std::fs::remove_file(file);
    let leases = Leases::create(file).map_err(failed)?;
    let holder = leases.holder(0).ok_or("no place in the file")?;
    let over = AtomicBool::new(false);
    let env =
        [("LD_PRELOAD", library.as_os_str()), (super::gates::FILE_VARIABLE, file.as_os_str())];
    let report = std::thread::scope(|scope| {
        scope.spawn(|| {
            let mut arrived = None;
            while !over.load(Ordering::Relaxed) {
                holder.close(HOLD);
                if !leases.entered().is_empty() {
                    arrived.get_or_insert_with(Instant::now);
                }
                if arrived.is_some_and(|at| at.elapsed() >= HOLD) {
                    break;
                }
                std::thread::sleep(RENEW);
            }
            holder.leave();
        });
        let report = look(program, gpu, Some(mps), false, &env);
        over.store(true, Ordering::Relaxed);
        report
    });
    let gated = leases.entered();
    let _ = std::fs::remove_file(file);
    ran_on(report.as_ref())?;
    let held = gated.iter().map(|g| g.held).max().ok_or("no launch came by the library")?;
    if held < LEAST_HELD {
        return Err(format!(
            "a launch waited {} ms instead of {}",
            held.as_millis(),
            HOLD.as_millis()
        ));
    }
    Ok(held.as_millis())
}

/// Tests the limits of an MPS daemon that runs.
fn test_mps(program: &Path, gpu: &GpuInfo, mps: &Mps, plain: &Result<Report, String>) -> Found {
    let by_variables = || judge(plain, Some(&look(program, gpu, Some(mps), true, &[])), None);
    if mps.has_clients() {
        // Processes of jobs that connect now must not get the limits of a test.
        return Found { control: Control::Untested, ..by_variables() };
    }
    let half = Limit { sm_permille: 10 * PERCENT as u16, mem_mib: Some(LIMIT_MIB) };
    let limited = mps.limit(half, gpu.mem_mib).and_then(|()| {
        let limited = look(program, gpu, Some(mps), false, &[]);
        mps.limit(Limit::WHOLE, gpu.mem_mib).and(limited)
    });
    let found = judge(plain, Some(&limited), None);
    if found.tier == Tier::MpsV2 {
        let what = format!("{}; both limits were set at the MPS control", found.what);
        return Found { what, control: Control::Holds, ..found };
    }
    let kept = by_variables();
    if kept.tier == Tier::MpsV2 {
        let what = format!(
            "{}; these limits hold only for processes that keep their variables, for set at the \
             MPS control they do not: {}",
            kept.what, found.what
        );
        return Found { what, ..kept };
    }
    found
}

/// Has a child process test the GPU, limited by variables or not.
fn look(
    program: &Path,
    gpu: &GpuInfo,
    mps: Option<&Mps>,
    by_variables: bool,
    env: &[(&str, &OsStr)],
) -> Result<Report, String> {
    let mut command = Command::new(program);
    command.args(["gpu-test", "--device", "0", "--over-mib", &WANTED_MIB.to_string()]);
    let ours: Vec<OsString> = std::env::vars_os().map(|(name, _)| name).collect();
    for name in ours.iter().filter(|n| n.as_bytes().starts_with(b"CUDA_")) {
        command.env_remove(name);
    }
    command.env("CUDA_VISIBLE_DEVICES", &gpu.uuid).envs(env.iter().copied());
    if let Some(mps) = mps {
        command.envs(mps.env());
        if by_variables {
            command.env("CUDA_MPS_PINNED_DEVICE_MEM_LIMIT", format!("0={LIMIT_MIB}M"));
            command.env("CUDA_MPS_ACTIVE_THREAD_PERCENTAGE", PERCENT.to_string());
        }
    } else {
        // A directory without a daemon, so that another user's daemon is not found by accident.
        let nowhere = format!("roommate-no-mps-{}", std::process::id());
        command.env("CUDA_MPS_PIPE_DIRECTORY", std::env::temp_dir().join(nowhere));
    }
    let leave = |pid| {
        if let Some(mps) = mps {
            let _ = mps.terminate_client(pid);
        }
    };
    let output = bounded_command::run(command, "", PATIENCE, leave)?;
    serde_json::from_str(&output.out).map_err(|_| {
        let words = format!("{} {}", output.out.trim(), output.err.trim());
        format!("the child process that tests the GPU printed {:?}", words.trim())
    })
}

/// The result of a test without limits and, if there is MPS, one with limits.
fn judge(
    plain: &Result<Report, String>,
    limited: Option<&Result<Report, String>>,
    absent: Option<String>,
) -> Found {
    let mut findings = Vec::new();
    let whole = ran_on(plain.as_ref());
    match &whole {
        Ok(sms) => findings.push(format!("without MPS a kernel ran on {sms} SMs")),
        Err(e) => findings.push(format!("without MPS no kernel ran: {e}")),
    }
    findings.extend(absent.map(|e| format!("no MPS: {e}")));
    let (mut held, mut part) = (false, Err(String::new()));
    if let Some(limited) = limited {
        part = ran_on(limited.as_ref());
        let (memory, words) = memory(plain.as_ref().ok(), limited.as_ref().ok());
        findings.extend(words);
        let sms = match (&part, &whole) {
            (Ok(part), Ok(whole)) => {
                findings.push(format!("a kernel allowed {PERCENT}% ran on {part} of {whole} SMs"));
                part * 100 <= whole * ALLOWED_PERCENT
            }
            (Ok(part), Err(_)) => {
                findings.push(format!("a kernel allowed {PERCENT}% ran on {part} SMs"));
                false
            }
            (Err(e), _) => {
                findings.push(format!("with MPS no kernel ran: {e}"));
                false
            }
        };
        held = memory && sms;
    }
    Found {
        tier: if held { Tier::MpsV2 } else { Tier::TimeSlicing },
        usable: whole.is_ok() || part.is_ok(),
        what: findings.join("; "),
        groups: plain.as_ref().ok().and_then(|r| r.groups).unwrap_or(0),
        untested: Vec::new(),
        control: Control::default(),
        gated: false,
    }
}

/// The number of SMs on which the kernel ran, if it ran and its results are right.
fn ran_on(look: Result<&Report, &String>) -> Result<u32, String> {
    let report = look.map_err(Clone::clone)?;
    match (&report.kernel, &report.error) {
        (Some(kernel), _) if kernel.right => Ok(kernel.on_sms),
        (Some(_), _) => Err("its results are wrong".into()),
        (None, Some(error)) => Err(error.clone()),
        (None, None) => Err("it was not tried".into()),
    }
}

/// Whether the memory limit was enforced, and a sentence about it.
fn memory(plain: Option<&Report>, limited: Option<&Report>) -> (bool, Option<String>) {
    let refused = |r: Option<&Report>| {
        let tried = r?.over.as_ref()?;
        Some(tried.refused.clone())
    };
    let small = limited.and_then(|l| l.small.as_ref()).is_some_and(|t| t.refused.is_none());
    let what = format!("an allocation of {WANTED_MIB} MiB above a limit of {LIMIT_MIB} MiB");
    match (refused(limited), refused(plain)) {
        (Some(None), _) => (false, Some(format!("{what} succeeded"))),
        (Some(Some(why)), Some(None)) if small => (true, Some(format!("{what} failed ({why})"))),
        (Some(Some(why)), Some(None)) => {
            (false, Some(format!("{what} failed ({why}), and so did a small one")))
        }
        (Some(Some(_)), _) => {
            (false, Some(format!("{what} failed, but without a limit as well: free some memory")))
        }
        (None, _) => (false, None),
    }
}

fn untested(gpu: &GpuInfo, controllers: &str) -> Vec<String> {
    let major = gpu.driver.split('.').next().and_then(|v| v.parse::<u32>().ok());
    let mut found = Vec::new();
    if major.is_some_and(|v| v >= MPS_V3_DRIVER) {
        found.push(format!("MPS v3 (driver {})", gpu.driver));
    }
    if controllers.split_whitespace().any(|c| c == "dmem") {
        found.push("limits of GPU memory by cgroup (dmem)".into());
    }
    if gpu.mig {
        found.push("MIG (the GPU is divided into instances)".into());
    }
    found
}

#[cfg(test)]
mod tests {
    use super::super::fake;
    use super::*;
    use roommate_cuda::{Kernel, Tried};
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    fn report(on_sms: u32, over: Option<&str>) -> Report {
        let tried = |mib, refused: Option<&str>| Tried { mib, refused: refused.map(String::from) };
        Report {
            sms: Some(on_sms),
            groups: Some(on_sms / 8),
            total_mib: Some(4096),
            free_mib: Some(4000),
            over: Some(tried(WANTED_MIB, over)),
            small: Some(tried(16, None)),
            kernel: Some(Kernel { right: true, on_sms }),
            error: None,
        }
    }

    #[test]
    fn a_tier_is_in_force_only_if_both_limits_hold() {
        let of = |plain: Report, limited: Report| judge(&Ok(plain), Some(&Ok(limited)), None);
        let (whole, oom) = (report(132, None), Some("CUDA_ERROR_OUT_OF_MEMORY"));
        let good = of(whole.clone(), report(66, oom));
        assert_eq!((good.tier, good.usable), (Tier::MpsV2, true));
        assert_eq!(
            good.what,
            "without MPS a kernel ran on 132 SMs; an allocation of 2048 MiB above a limit of \
             1024 MiB failed (CUDA_ERROR_OUT_OF_MEMORY); a kernel allowed 50% ran on 66 of 132 SMs"
        );
        // Both limits have to be enforced.
        let memory = of(whole.clone(), report(66, None));
        assert_eq!(memory.tier, Tier::TimeSlicing);
        assert!(memory.what.contains("limit of 1024 MiB succeeded"), "{}", memory.what);
        let sms = of(whole.clone(), report(132, oom));
        assert_eq!(sms.tier, Tier::TimeSlicing);
        assert!(sms.what.ends_with("ran on 132 of 132 SMs"), "{}", sms.what);
        // A full GPU proves nothing.
        let full = of(report(132, oom), report(66, oom));
        assert_eq!(full.tier, Tier::TimeSlicing);
        assert!(full.what.contains("without a limit as well: free some memory"), "{}", full.what);
        let wrong = Kernel { right: false, on_sms: 66 };
        let wrong = of(whole, Report { kernel: Some(wrong), ..report(66, oom) });
        assert_eq!((wrong.tier, wrong.usable), (Tier::TimeSlicing, true));
        assert!(wrong.what.ends_with("with MPS no kernel ran: its results are wrong"));
    }

    #[test]
    fn a_broken_gpu_is_reported_as_unusable() {
        let broken = Report { error: Some("could not find the GPU".into()), ..Report::default() };
        let it = judge(&Ok(broken), None, Some("MPS is not used".into()));
        assert_eq!((it.tier, it.usable), (Tier::TimeSlicing, false));
        assert_eq!(
            it.what,
            "without MPS no kernel ran: could not find the GPU; no MPS: MPS is not used"
        );
    }

    #[test]
    fn untested_mechanisms_are_listed() {
        assert!(untested(&fake::gpu(), "cpuset cpu io memory").is_empty());
        let new = GpuInfo { driver: "615.12".into(), mig: true, ..fake::gpu() };
        let found = untested(&new, "cpu memory dmem");
        assert_eq!(found.len(), 3, "{found:?}");
    }

    /// A stand-in for this program that checks the environment with which it is run.
    fn program(folder: &Path, lines: &str) -> std::path::PathBuf {
        let at = folder.join("program");
        fs::write(&at, format!("#!/bin/sh\n{lines}\n")).unwrap();
        fs::set_permissions(&at, fs::Permissions::from_mode(0o755)).unwrap();
        at
    }

    /// Prints a report, by how it is limited: by nothing, by variables, or by the MPS control.
    fn reports(plain: &Report, by_variables: &Report, by_control: &Report) -> String {
        let json = |r: &Report| serde_json::to_string(r).unwrap();
        format!(
            r#"[ "$*" = "gpu-test --device 0 --over-mib 2048" ] || exit 1
            [ "$CUDA_VISIBLE_DEVICES" = {} ] || exit 1
            if [ "$CUDA_MPS_PINNED_DEVICE_MEM_LIMIT" = 0=1024M ]; then
                [ "$CUDA_MPS_ACTIVE_THREAD_PERCENTAGE" = 50 ] && echo '{}'
            elif [ -S "$CUDA_MPS_PIPE_DIRECTORY/control" ]; then
                [ "$(cat "$CUDA_MPS_PIPE_DIRECTORY/fake-limits")" = "50.0 1024" ] && echo '{}'
            else
                echo '{}'
            fi"#,
            fake::gpu().uuid,
            json(by_variables),
            json(by_control),
            json(plain),
        )
    }

    #[test]
    fn limits_of_the_control_are_tested_without_variables() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, limited) = (report(132, None), report(66, Some("no")));
        let program = program(folder.path(), &reports(&plain, &plain, &limited));
        let mps = fake::mps(folder.path());
        let found = test(&program, &fake::gpu(), Some(&mps), None);
        let after = mps.limit(Limit::WHOLE, fake::gpu().mem_mib);
        mps.stop();
        assert_eq!(after, Ok(()));
        assert_eq!((found.tier, found.usable), (Tier::MpsV2, true), "{}", found.what);
        assert_eq!(found.control, Control::Holds);
        assert!(found.what.ends_with("; both limits were set at the MPS control"));
        let without = test(&program, &fake::gpu(), None, None);
        assert_eq!((without.tier, without.usable), (Tier::TimeSlicing, true));
        assert_eq!(without.what, "without MPS a kernel ran on 132 SMs; no MPS: MPS is not used");
    }

    #[test]
    fn limits_that_only_variables_keep_are_said_to_be_so() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, limited) = (report(132, None), report(66, Some("no")));
        let program = program(folder.path(), &reports(&plain, &limited, &plain));
        let mps = fake::mps(folder.path());
        let found = test(&program, &fake::gpu(), Some(&mps), None);
        mps.stop();
        assert_eq!((found.tier, found.control), (Tier::MpsV2, Control::Fails));
        assert!(found.what.contains("hold only for processes that keep their variables"));
    }

    #[test]
    fn a_test_does_not_limit_the_processes_of_jobs() {
        let folder = tempfile::tempdir().unwrap();
        let (plain, limited) = (report(132, None), report(66, Some("no")));
        let program = program(folder.path(), &reports(&plain, &limited, &plain));
        let mps = fake::mps(folder.path());
        mps.ensure().unwrap();
        let clients = folder.path().join("mps-00000000/log/fake-clients");
        fs::write(&clients, "71").unwrap();
        let found = test(&program, &fake::gpu(), Some(&mps), None);
        let log = fs::read_to_string(clients.with_file_name("control.log")).unwrap();
        fs::remove_file(clients).unwrap();
        mps.stop();
        assert_eq!((found.tier, found.control), (Tier::MpsV2, Control::Untested));
        assert!(!log.contains("Command set_"), "{log}");
    }

    #[test]
    fn a_child_process_that_fails_is_quoted() {
        let folder = tempfile::tempdir().unwrap();
        let program = program(folder.path(), "echo oh no >&2; exit 1");
        let found = test(&program, &fake::gpu(), None, None);
        assert!(!found.usable);
        assert!(found.what.contains("tests the GPU printed \"oh no\""), "{}", found.what);
    }
}
