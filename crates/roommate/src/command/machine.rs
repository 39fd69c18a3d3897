//! Commands that query or control the daemon: `ps`, `describe`, `cancel`, `suspend`, `resume`,
//! `resize`, `down`.

use crate::cli::machine::{At, Describe, Down, Listing, OnJobs, Ps, Resize, StateArg};
use crate::{console, table};
use roommate_agent::Client;
use roommate_agent::api::client::Server;
use roommate_agent::api::control::{JobView, MachineView, Reply, Request, ServiceView};
use roommate_agent::device::GpuView;
use roommate_agent::paths::Paths;
use roommate_agent::process::rotated_file::Place;
use serde::Serialize;
use std::process::ExitCode;

/// The state folder from the flags.
pub(super) fn paths(state: &StateArg) -> Paths {
    state.state.as_ref().map_or_else(Paths::usual, Paths::new)
}

/// The value of an environment variable, if it is set and not empty.
fn var(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|v| !v.is_empty())
}

/// A client for the daemon from the flags and the environment.
pub(super) fn client(at: &At) -> anyhow::Result<Client> {
    let from_env = || var("ROOMMATE_SERVER").filter(|_| at.state.state.is_none());
    let Some(server) = at.server.clone().or_else(from_env) else {
        return Ok(Client::Socket(paths(&at.state)));
    };
    let fingerprint = var("ROOMMATE_SERVER_FINGERPRINT");
    let server = Server::new(&server, fingerprint.as_deref(), &paths(&at.state))?;
    let file = match (&at.token_file, var("ROOMMATE_HTTP_TOKEN")) {
        (None, Some(token)) => return Ok(Client::Http { server, token }),
        (Some(file), _) => file.clone(),
        (None, None) => paths(&at.state).token(),
    };
    let token = std::fs::read_to_string(&file).map_err(|e| {
        let what = format!("could not read the token in {:?}: {e}", file.display().to_string());
        let hint = "`roommate token create` on that machine prints one; give it with --token-file";
        console::advise(what, hint)
    })?;
    Ok(Client::Http { server, token: token.trim().into() })
}

/// The files of a daemon's journal from a position on, by number; only complete lines. It is an
/// error if no daemon has run.
pub(super) fn journal_parts(
    client: &Client,
    from: &mut Place,
) -> anyhow::Result<Vec<(u64, Vec<u8>)>> {
    if let Client::Socket(paths) = client
        && paths.journal().try_exists().is_ok_and(|exists| !exists)
    {
        let what = format!("there is no journal at {:?}", paths.journal().display().to_string());
        let hint = "`roommate up` starts one; a journal of your own goes behind --journal";
        return Err(console::advise(what, hint));
    }
    let mut parts: Vec<(u64, Vec<u8>)> = Vec::new();
    loop {
        let (bytes, next) = client.journal(*from)?;
        if bytes.is_empty() {
            break;
        }
        match parts.last_mut().filter(|(number, _)| *number == next.part) {
            Some((_, part)) => part.extend(bytes),
            None => parts.push((next.part, bytes)),
        }
        *from = next;
    }
    if let Some((_, last)) = parts.last_mut() {
        let whole = last.iter().rposition(|b| *b == b'\n').map_or(0, |at| at + 1);
        from.at -= (last.len() - whole) as u64;
        last.truncate(whole);
    }
    parts.retain(|(_, part)| !part.is_empty());
    Ok(parts)
}

pub(super) fn ps(args: &Ps) -> anyhow::Result<ExitCode> {
    let Reply::Jobs(mut jobs) = client(&args.at)?.ask(&Request::Ps {})? else {
        anyhow::bail!("unexpected reply from the daemon");
    };
    jobs.retain(|j| !args.alive || !j.ended);
    if document(&jobs, args.output)? {
        return Ok(ExitCode::SUCCESS);
    }
    console::print(&list(&jobs, args.output == Listing::Wide))?;
    Ok(ExitCode::SUCCESS)
}

/// Prints JSON or YAML; returns false for other formats.
pub(super) fn document(value: &impl Serialize, output: Listing) -> anyhow::Result<bool> {
    let text = match output {
        Listing::Json => serde_json::to_string_pretty(value)? + "\n",
        Listing::Yaml => yaml_serde::to_string(value)?,
        Listing::Table | Listing::Wide => return Ok(false),
    };
    console::print(&text)?;
    Ok(true)
}

/// Jobs as a table.
pub(super) fn list(jobs: &[JobView], wide: bool) -> String {
    let mut head =
        vec!["name", "state", "devices", "share", "steps", "step", "batch", "starts", "age"];
    if wide {
        head.extend(["owner", "class", "team", "sdk", "mem", "keeper", "latency", "why"]);
    }
    let mut rows = vec![head.into_iter().map(String::from).collect::<Vec<_>>()];
    for j in jobs {
        let mut row = vec![
            j.name.clone(),
            j.state.clone(),
            numbers(&j.devices),
            share(j),
            steps(j),
            j.step_s.map_or("-".into(), seconds),
            j.batch.map_or("-".into(), |b| b.to_string()),
            j.starts.to_string(),
            table::figure(Some(j.age_s), "s"),
        ];
        if wide {
            row.extend([
                j.owner.name.clone(),
                j.class.clone(),
                j.team.clone().unwrap_or_else(|| "-".into()),
                if j.cooperative { "yes" } else { "no" }.into(),
                memory(j).unwrap_or_else(|| "-".into()),
                j.keeper_pid.map_or("-".into(), |p| p.to_string()),
                j.service.as_ref().map_or("-".into(), latency),
                j.why.clone().unwrap_or_else(|| "-".into()),
            ]);
        }
        rows.push(row);
    }
    if rows.len() == 1 { "no jobs\n".into() } else { table::align_left(&rows) }
}

fn numbers(devices: &[u32]) -> String {
    let text: Vec<String> = devices.iter().map(u32::to_string).collect();
    if text.is_empty() { "-".into() } else { text.join(",") }
}

pub(super) fn share(j: &JobView) -> String {
    let pace = if j.pace < 1.0 { format!(" at {:.0}%", j.pace * 100.0) } else { String::new() };
    let share = if j.share == 0.0 { "free".into() } else { format!("{:.0}%", j.share * 100.0) };
    share + &pace
}

/// GPU memory of a job on a GPU, otherwise host memory.
pub(super) fn memory(j: &JobView) -> Option<String> {
    j.gpu_mib.or(j.mem_mib).map(|m| format!("{m} MiB"))
}

/// The latency of a service against its objective.
fn latency(s: &ServiceView) -> String {
    let kept = s.quantile.get() * 100.0;
    let objective = format!("p{} {} ms", kept.to_string().replace('.', ""), s.objective_ms);
    if !s.ready {
        return format!("not ready, to keep {objective}");
    }
    format!("p99 {:.1} ms, to keep {objective}", s.p99_ms)
}

/// What a service has done so far.
fn requests(s: &ServiceView) -> String {
    let late = format!("{} late ({:.2}%)", s.late, 100.0 * s.over_share.get());
    format!("{}, {late}, {} waiting", s.requests, s.queued)
}

fn steps(j: &JobView) -> String {
    match j.steps {
        Some(all) => format!("{:.0}/{all:.0}", j.done.get().min(all.get())),
        None if j.step_s.is_some() => format!("{:.0}", j.done),
        None => "-".into(),
    }
}

/// The duration of a step in a suitable unit.
pub(super) fn seconds(s: impl Into<f64>) -> String {
    match s.into() {
        s if s < 1e-3 => format!("{:.0} us", s * 1e6),
        s if s < 1.0 => format!("{:.1} ms", s * 1e3),
        s => format!("{s:.2} s"),
    }
}

pub(super) fn describe(args: &Describe) -> anyhow::Result<ExitCode> {
    let client = client(&args.at)?;
    let rows = match &args.job {
        None => {
            let Reply::Machine(machine) = client.ask(&Request::Machine {})? else {
                anyhow::bail!("unexpected reply from the daemon");
            };
            if document(&machine, args.output)? {
                return Ok(ExitCode::SUCCESS);
            }
            machine_rows(&machine, &client)
        }
        Some(job) => {
            let Reply::Job(job) = client.ask(&Request::Describe { job: job.clone() })? else {
                anyhow::bail!("unexpected reply from the daemon");
            };
            if document(&job, args.output)? {
                return Ok(ExitCode::SUCCESS);
            }
            job_rows(&job)
        }
    };
    let rows: Vec<Vec<String>> = rows.into_iter().map(|(k, v)| vec![k.to_string(), v]).collect();
    console::print(&table::align_left(&rows))?;
    Ok(ExitCode::SUCCESS)
}

fn machine_rows(m: &MachineView, client: &Client) -> Vec<(&'static str, String)> {
    let mut rows = vec![
        ("machine", m.cluster.clone()),
        ("policy", m.policy.clone()),
        ("shares", format!("{} ({})", m.enforcement.tier, m.enforcement.what)),
        ("jobs", format!("{} not ended", m.jobs)),
        ("up", table::figure(Some(m.up_s), "s")),
        ("daemon", format!("process {}, {:.1} MiB", m.pid, m.rss_mib)),
    ];
    rows.extend(m.gpus.iter().map(|g| ("gpu", gpu(g))));
    rows.push(("journal", m.journal.clone()));
    if let Some(http) = &m.http {
        rows.push(("http", http.clone()));
    }
    if let Client::Socket(paths) = client {
        rows.push(("state", paths.root().display().to_string()));
    }
    rows.extend(m.notices.iter().map(|notice| ("notice", notice.clone())));
    rows
}

/// Description of a GPU in one line.
fn gpu(g: &GpuView) -> String {
    let mut text = format!("{}, {} SMs, ", g.name, g.sms);
    text += &g.used_mib.map_or(String::new(), |used| format!("{used} of "));
    text += &format!("{} MiB", g.mem_mib);
    text += &gpu_load(g).map_or(String::new(), |load| format!(", {load}"));
    if let Some(mps) = &g.mps {
        let again = match g.mps_restarts {
            0 => String::new(),
            n => format!(", started again {}", table::count(n.into(), "time")),
        };
        text += &format!(", MPS {mps}{again}");
    }
    g.strays.iter().fold(text, |text, stray| format!("{text}; stranger: {stray}"))
}

/// Utilisation of a GPU, if it is measured.
pub(super) fn gpu_load(g: &GpuView) -> Option<String> {
    let percent = |v: f32| format!("{:.0}%", 100.0 * v);
    Some(format!("SMs {}, memory bandwidth {}", percent(g.sm_util?), percent(g.dram?)))
}

pub(super) fn job_rows(j: &JobView) -> Vec<(&'static str, String)> {
    let or = |v: Option<String>| v.unwrap_or_else(|| "-".into());
    let tenant = if j.cooperative && j.service.is_some() {
        "its front speaks with the machine"
    } else if j.cooperative {
        "speaks with the machine through the SDK"
    } else {
        "opaque: held by signals"
    };
    let mut rows = vec![
        ("name", j.name.clone()),
        ("state", j.state.clone()),
        ("why", or(j.why.clone())),
        ("command", j.command.join(" ")),
        ("devices", numbers(&j.devices)),
        ("share", share(j)),
        ("steps", steps(j)),
        ("step", or(j.step_s.map(seconds))),
        ("time left", or(j.left_s.map(|s| table::figure(Some(s), "s")))),
        ("batch", or(j.batch.map(|b| b.to_string()))),
        ("noise scale", or(j.noise_scale.map(|n| format!("{n:.1}")))),
        ("memory", or(j.mem_mib.map(|m| format!("{m} MiB")))),
        ("owner", j.owner.name.clone()),
        ("class", j.class.clone()),
        ("team", or(j.team.clone())),
        ("starts", format!("{}, {} failed", j.starts, j.failures)),
        ("last exit", or(j.exit.clone())),
        ("age", table::figure(Some(j.age_s), "s")),
        ("log", j.log.clone()),
    ];
    let at = rows.iter().position(|(name, _)| *name == "owner").unwrap_or(0);
    let gpu = [("GPU memory", j.gpu_mib.map(|m| format!("{m} MiB"))), ("seat", seat(j))];
    rows.splice(at..at, gpu.into_iter().filter_map(|(name, value)| Some((name, value?))));
    if let Some(s) = &j.service {
        let of_training = ["steps", "step", "time left", "batch", "noise scale"];
        rows.retain(|(name, _)| !of_training.contains(name));
        let at = rows.iter().position(|(name, _)| *name == "share").map_or(0, |at| at + 1);
        let ready = if s.ready { "ready" } else { "not ready" };
        let own = [
            ("serves", format!("{} at port {}, {ready}", s.model, s.port)),
            ("latency", format!("{}, median {:.1} ms", latency(s), s.p50_ms)),
            ("requests", requests(s)),
        ];
        rows.splice(at..at, own);
    }
    if j.keeper_pid.is_some() {
        rows.insert(4, ("tenant", tenant.into()));
    }
    rows
}

/// The part of the GPU in which the job runs.
fn seat(j: &JobView) -> Option<String> {
    let apart = "apart from others, because they died when it did";
    j.seat.clone().or_else(|| j.apart.then(|| apart.into()))
}

/// Sends a request for each of the jobs.
pub(super) fn each(args: &OnJobs, request: impl Fn(String) -> Request) -> anyhow::Result<ExitCode> {
    let client = client(&args.at)?;
    for job in &args.jobs {
        if let Reply::Done { what } = client.ask(&request(job.clone()))? {
            console::say(&what);
        }
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn resize(args: &Resize) -> anyhow::Result<ExitCode> {
    let request = Request::Resize { job: args.job.clone(), batch: args.batch, share: args.share };
    if let Reply::Done { what } = client(&args.at)?.ask(&request)? {
        console::say(&what);
    }
    Ok(ExitCode::SUCCESS)
}

pub(super) fn down(args: &Down) -> anyhow::Result<ExitCode> {
    let stop_jobs = args.stop_jobs;
    let client = client(&args.at)?;
    client.ask(&Request::Down { stop_jobs })?;
    client.await_end()?;
    console::say(if stop_jobs {
        "down"
    } else {
        "down: jobs go on, and `roommate up` finds them again"
    });
    Ok(ExitCode::SUCCESS)
}
