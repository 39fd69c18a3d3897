//! `roommate kube`: the commands for Kubernetes.

mod screens;
mod user;
mod what_if;

use crate::cli::Output;
use crate::cli::kube::{Bench, Fuzz, Kube, Scheduler, Webhook};
use crate::{ANSWER_NO, console, experiment, table};
use anyhow::Context;
use roommate_agent::process::signal;
use roommate_core::policy::Params;
use roommate_core::state::Costs;
use roommate_core::time::Span;
use roommate_kube::scheduler::{Election, Options};
use roommate_kube::webhook::Certificate;
use roommate_kube::world::Settings;
use roommate_kube::{bench, fuzz, scheduler, webhook};
use serde_json::Value;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) fn run(command: Kube) -> anyhow::Result<ExitCode> {
    match command {
        Kube::Scheduler(args) => schedule(&args),
        Kube::Webhook(args) => admit(&args),
        Kube::User(command) => user::run(command),
        Kube::Bench(args) => measure(&args),
        Kube::Fuzz(args) => try_randomly(&args),
    }
}

fn schedule(args: &Scheduler) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let params: Params =
        args.set.iter().map(|s| experiment::param(s)).collect::<anyhow::Result<_>>()?;
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim();
    let began = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?.as_micros();
    let lasts = Duration::from_secs_f64(args.lease_seconds);
    let options = Options {
        access: args.cluster.access(),
        settings: Settings {
            params,
            costs: Costs {
                backoff: Span::from_secs(1.0),
                max_tenants: args.max_tenants,
                ..Costs::default()
            },
            seed: args.seed,
            scheduler: args.name.clone(),
            ..Settings::of(&args.policy)
        },
        listen: args.listen.0,
        election: (!args.no_leader_election).then(|| Election {
            namespace: args.lease_namespace.clone(),
            name: args.lease_name.clone(),
            identity: format!("{host}_{}_{began}", std::process::id()),
            lasts,
            renew_within: lasts * 2 / 3,
            every: lasts * 2 / 15,
        }),
        in_flight: args.in_flight.into(),
        instance: host.into(),
    };
    let ended = until(wanted);
    console::say(&format!("policy {}, scheduler {}", args.policy, args.name));
    let told = &mut |what: &str| console::say_lines(what);
    runtime()?.block_on(scheduler::run(options, ended, told))?;
    Ok(ExitCode::SUCCESS)
}

fn admit(args: &Webhook) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let certificate = match (&args.cert, &args.key) {
        (Some(certificate), Some(key)) => {
            Certificate::Files { certificate: certificate.clone(), key: key.clone() }
        }
        _ => Certificate::Own {
            access: args.cluster.access(),
            configuration: args.configuration.clone(),
        },
    };
    let options =
        webhook::Options { listen: args.listen, certificate, scheduler: args.scheduler.clone() };
    let told = &mut |what: &str| console::say_lines(what);
    runtime()?.block_on(webhook::run(options, until(wanted), told))?;
    Ok(ExitCode::SUCCESS)
}

/// Waits until a signal asks this process to end.
async fn until(wanted: Arc<AtomicBool>) {
    while !wanted.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn measure(args: &Bench) -> anyhow::Result<ExitCode> {
    let peer = match (&args.peer, &args.peer_program) {
        (None, _) => None,
        (Some(_), Some(program)) => Some(program.clone()),
        (Some(name), None) => {
            let missing = || {
                let what = format!("--peer {name}: there is no such program");
                console::advise(&what, "run `make kube`, or give --peer-program FILE")
            };
            Some(bench::find_peer(name).ok_or_else(missing)?)
        }
    };
    let plan = bench::Plan {
        access: args.cluster.access(),
        nodes: args.nodes,
        gpus: args.gpus,
        pods: args.pods,
        share: args.share,
        program: std::env::current_exe().context("this program")?,
        policy: args.policy.clone(),
        peer,
        within: Duration::from_secs(args.within),
    };
    let told = &mut |what: &str| console::say_lines(what);
    let outcome = runtime()?.block_on(bench::run(&plan, told))?;
    let all = outcome.own.bound == args.pods
        && outcome.peer.as_ref().is_none_or(|p| p.figures.bound == args.pods);
    print(args.output, &serde_json::to_value(&outcome)?)?;
    Ok(if all { ExitCode::SUCCESS } else { ExitCode::from(ANSWER_NO) })
}

fn try_randomly(args: &Fuzz) -> anyhow::Result<ExitCode> {
    let plan =
        fuzz::Plan { operations: args.operations, seed: args.seed, policy: args.policy.clone() };
    let bar = super::bar(args.operations as usize, "{bar:30} {pos}/{len} operations {eta}");
    let outcome = fuzz::run(&plan, &mut |done| bar.set_position(done)).map_err(anyhow::Error::msg);
    bar.finish_and_clear();
    let outcome = outcome?;
    print(args.output, &serde_json::to_value(&outcome)?)?;
    let good = outcome.first.is_none() && outcome.equal_to_rebuild;
    Ok(if good { ExitCode::SUCCESS } else { ExitCode::from(ANSWER_NO) })
}

fn runtime() -> anyhow::Result<tokio::runtime::Runtime> {
    tokio::runtime::Builder::new_current_thread().enable_all().build().context("tokio")
}

/// Prints figures: one to a line, those of a peer behind its name.
fn print(output: Output, figures: &Value) -> anyhow::Result<()> {
    let mut rows: Vec<Vec<String>> = Vec::new();
    flatten("", figures, &mut rows);
    match output {
        Output::Json => console::print(&(serde_json::to_string_pretty(figures)? + "\n")),
        Output::Csv => {
            let column = |i: usize| rows.iter().map(|r| r[i].clone()).collect::<Vec<_>>();
            console::print(&format!("{}\n{}\n", column(0).join(","), column(1).join(",")))
        }
        Output::Table => console::print(&table::align(&rows)),
    }
}

fn flatten(prefix: &str, value: &Value, rows: &mut Vec<Vec<String>>) {
    match value {
        Value::Object(map) => {
            for (key, value) in map {
                let name = if prefix.is_empty() { key.clone() } else { format!("{prefix}.{key}") };
                flatten(&name, value, rows);
            }
        }
        Value::Number(n) if n.is_f64() => {
            rows.push(vec![prefix.into(), format!("{:.3}", n.as_f64().unwrap_or_default())]);
        }
        Value::String(text) => rows.push(vec![prefix.into(), text.clone()]),
        Value::Null => rows.push(vec![prefix.into(), "none".into()]),
        other => rows.push(vec![prefix.into(), other.to_string()]),
    }
}
