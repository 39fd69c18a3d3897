//! `roommate up`: the daemon, and the internal commands that it starts.

use crate::cli::machine::{Deciding, DeviceKind, GpuTest, Keeper, Kept, Up};
use crate::{console, experiment, measurements};
use anyhow::Context;
use roommate_agent::api::control::{Reply, Request};
use roommate_agent::api::http::Http;
use roommate_agent::daemon::retention::Keeping;
use roommate_agent::daemon::{self, Config, Running};
use roommate_agent::device::Kind;
use roommate_agent::paths::Paths;
use roommate_agent::process::{signal, supervisor};
use roommate_core::measurement::known_profiles::KnownProfiles;
use roommate_core::policy::Params;
use roommate_core::state::Costs;
use roommate_core::time::Span;
use roommate_sim::trace;
use std::process::ExitCode;
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) fn run(args: &Up) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let paths = super::machine::paths(&args.state);
    let running = daemon::start(Config {
        http: args.http.map(|at| Http { at, beyond_loopback: args.http_beyond_loopback }),
        keeping: keeping(&args.kept),
        ..config(paths.clone(), &args.deciding)?
    })?;
    let Reply::Machine(machine) = running.ask(Request::Machine {})? else {
        anyhow::bail!("unexpected reply from the daemon");
    };
    console::say(&format!(
        "up: {} under policy {}, process {}",
        machine.cluster, machine.policy, machine.pid
    ));
    console::say(&format!("shares: {} ({})", machine.enforcement.tier, machine.enforcement.what));
    console::say(&format!("state: {}", paths.root().display()));
    for notice in &machine.notices {
        console::say(&format!("notice: {notice}"));
    }
    if let Some(http) = &machine.http {
        console::say(&format!("http: {http}, token in {}", paths.token().display()));
    }
    while !running.has_ended() {
        if wanted.load(Ordering::Relaxed) {
            let _ = running.inputs.send(daemon::Input::Quit { stop_jobs: false });
            console::say("down: jobs go on, and `roommate up` finds them again");
            break;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    running.join()?;
    Ok(ExitCode::SUCCESS)
}

/// The retention limits of the flags.
fn keeping(kept: &Kept) -> Keeping {
    let bytes = |mib: f64| (mib * 1024.0 * 1024.0) as u64;
    Keeping {
        log_bytes: bytes(kept.log_mib),
        log_parts: kept.log_parts.into(),
        ended_for: Duration::from_secs_f64(kept.keep_days * 86_400.0),
        ended_bytes: bytes(kept.keep_mib),
        journal_bytes: bytes(kept.journal_mib),
        journal_parts: kept.journal_parts.into(),
        ..Keeping::default()
    }
}

/// The daemon's configuration from the flags.
pub(super) fn config(paths: Paths, deciding: &Deciding) -> anyhow::Result<Config> {
    let params: Params =
        deciding.set.iter().map(|s| experiment::param(s)).collect::<anyhow::Result<_>>()?;
    let program = std::env::current_exe().context("could not find this program itself")?;
    let backoff = Span::from_secs(deciding.backoff);
    let kind = deciding.device.map(|kind| match kind {
        DeviceKind::Cpu => Kind::Cpu,
        DeviceKind::Cuda => Kind::Cuda,
    });
    Ok(Config {
        paths,
        program,
        policy: deciding.policy.clone(),
        params,
        kind,
        devices: deciding.devices,
        seed: deciding.seed,
        may_use_cgroups: !deciding.no_cgroups,
        costs: Costs { backoff, ..Config::usual_costs(kind.unwrap_or_default()) },
        known: known_profiles(deciding)?,
        http: None,
        keeping: Keeping::default(),
    })
}

/// The measurements of --profiles, with the sensitivity of the models in --sensitivity.
fn known_profiles(deciding: &Deciding) -> anyhow::Result<Option<KnownProfiles>> {
    let Some(prefix) = &deciding.profiles else { return Ok(None) };
    let mut known = KnownProfiles::of(&measurements::atlas(prefix)?);
    if let Some(table) = &deciding.sensitivity {
        let grids = trace::sensitivities(table)?;
        for (name, profile) in &mut known.profiles {
            let model = name.split('@').next().unwrap_or(name);
            profile.sensitivity = grids.get(model).map(|grid| Box::new((**grid).clone()));
        }
    }
    Ok(Some(known))
}

/// Stops a daemon in this process and its jobs.
pub(super) fn end(running: Running) -> anyhow::Result<()> {
    let _ = running.inputs.send(daemon::Input::Quit { stop_jobs: true });
    Ok(running.join()?)
}

pub(super) fn keeper(args: &Keeper) -> anyhow::Result<ExitCode> {
    match args.keeper {
        None => {
            let program = std::env::current_exe().context("could not find this program itself")?;
            supervisor::keep(&args.folder, &program)?;
            Ok(ExitCode::SUCCESS)
        }
        Some(keeper) => {
            let Err(error) = supervisor::become_command(&args.folder, keeper) else {
                return Ok(ExitCode::SUCCESS);
            };
            console::say(&format!("error: {error}"));
            // The exit code of shells for a command that cannot be started.
            Ok(ExitCode::from(127))
        }
    }
}

/// Prints what this process can do on a GPU; failures are part of the report.
pub(super) fn gpu_test(args: &GpuTest) -> anyhow::Result<ExitCode> {
    let report = roommate_cuda::self_test(args.device, args.over_mib);
    console::print(&format!("{}\n", serde_json::to_string(&report)?))?;
    Ok(ExitCode::SUCCESS)
}
