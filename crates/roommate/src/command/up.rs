//! `roommate up`: the daemon, and the internal commands that it starts.

use crate::cli::machine::{Deciding, DeviceKind, GpuTest, Keeper, Kept, Up};
use crate::{console, experiment, measurements};
use roommate_agent::AgentError;
use roommate_agent::api::caller::Mode;
use roommate_agent::api::control::{Reply, Request};
use roommate_agent::api::http::Http;
use roommate_agent::daemon::quotas::Quotas;
use roommate_agent::daemon::retention::Keeping;
use roommate_agent::daemon::{self, Config, Running};
use roommate_agent::device::Kind;
use roommate_agent::paths::Paths;
use roommate_agent::process::{THIS_PROGRAM, signal, supervisor};
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
    let elsewhere = args.state.state.is_some() || std::env::var_os("ROOMMATE_STATE").is_some();
    let paths = if args.system && !elsewhere {
        Paths::of_system()
    } else {
        super::machine::paths(&args.state)
    };
    let mut quotas = Quotas::default();
    for limit in &args.quota {
        quotas.set(limit).map_err(|what| anyhow::anyhow!("--quota: {what}"))?;
    }
    let mode = if args.system {
        Mode::System { group: args.group, admins: args.admins }
    } else {
        Mode::User
    };
    let running = daemon::start(Config {
        mode,
        quotas,
        http: args.http.map(|at| Http { at, plain: args.http_plain }),
        keeping: keeping(&args.kept),
        // A daemon for all users is the only one.
        claim: args.system || args.deciding.claim,
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
        console::say(&format!("http: {http}"));
        if !mode.is_system() {
            console::say(&format!("token: in {}", paths.token().display()));
        }
    }
    while !running.has_ended() {
        if wanted.load(Ordering::Relaxed) {
            running.quit(false);
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
    let backoff = Span::from_secs(deciding.backoff);
    let kind = deciding.device.map(|kind| match kind {
        DeviceKind::Cpu => Kind::Cpu,
        DeviceKind::Cuda => Kind::Cuda,
    });
    Ok(Config {
        paths,
        program: THIS_PROGRAM.into(),
        policy: deciding.policy.clone(),
        params,
        kind,
        devices: deciding.devices,
        seed: deciding.seed,
        may_use_cgroups: !deciding.no_cgroups,
        claim: deciding.claim,
        without: deciding.without.iter().map(|m| (*m).into()).collect(),
        costs: Costs {
            backoff,
            max_tenants: deciding.max_tenants,
            ..Config::usual_costs(kind.unwrap_or_default())
        },
        known: known_profiles(deciding)?,
        learned: deciding.learned.clone(),
        http: None,
        keeping: Keeping::default(),
        mode: Mode::User,
        quotas: Quotas::default(),
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
    running.quit(true);
    Ok(running.join()?)
}

pub(super) fn keeper(args: &Keeper) -> anyhow::Result<ExitCode> {
    match args.keeper {
        None => {
            supervisor::keep(&args.folder)?;
            Ok(ExitCode::SUCCESS)
        }
        Some(keeper) => {
            let Err(error) = supervisor::become_command(&args.folder, keeper) else {
                return Ok(ExitCode::SUCCESS);
            };
            console::say(&format!("error: {error}"));
            // The exit codes of shells for a command that does not exist or cannot be started.
            let missing = matches!(&error, AgentError::File { error, .. }
                if error.kind() == std::io::ErrorKind::NotFound);
            Ok(ExitCode::from(if missing { 127 } else { 126 }))
        }
    }
}

/// Prints what this process can do on a GPU; failures are part of the report.
pub(super) fn gpu_test(args: &GpuTest) -> anyhow::Result<ExitCode> {
    let report = roommate_cuda::self_test(args.device, args.over_mib);
    console::print(&format!("{}\n", serde_json::to_string(&report)?))?;
    Ok(ExitCode::SUCCESS)
}
