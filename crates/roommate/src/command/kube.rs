//! `roommate kube`: the commands for Kubernetes.

use crate::cli::Output;
use crate::cli::kube::{Agent, Bench, Fuzz, Kube, Scheduler};
use crate::{ANSWER_NO, console, experiment, table};
use anyhow::Context;
use roommate_agent::device::Kind;
use roommate_agent::process::{THIS_PROGRAM, signal};
use roommate_core::policy::Params;
use roommate_core::state::Costs;
use roommate_core::time::Span;
use roommate_kube::scheduler::{Election, Options};
use roommate_kube::world::Settings;
use roommate_kube::{agent, bench, crd, fuzz, scheduler};
use serde_json::Value;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) fn run(command: Kube) -> anyhow::Result<ExitCode> {
    match command {
        Kube::Scheduler(args) => schedule(&args),
        Kube::Agent(args) => attend(&args),
        Kube::Crds => print_crds(),
        Kube::Bench(args) => measure(&args),
        Kube::Fuzz(args) => try_randomly(&args),
    }
}

fn schedule(args: &Scheduler) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let set: Params =
        args.set.iter().map(|s| experiment::param(s)).collect::<anyhow::Result<_>>()?;
    let usual = Settings::of(&args.policy);
    let params = usual.params.clone().into_iter().chain(set).collect();
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
            ..usual
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
    console::say(&format!("policy {}, scheduler {}", args.policy, args.name));
    let told = &mut |what: &str| console::say_lines(what);
    runtime()?.block_on(scheduler::run(options, until(wanted), told))?;
    Ok(ExitCode::SUCCESS)
}

fn attend(args: &Agent) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let options = agent::Options {
        access: args.cluster.access(),
        node: args.node_name.clone(),
        kind: match args.device.as_str() {
            "cpu" => Some(Kind::Cpu),
            "cuda" => Some(Kind::Cuda),
            _ => None,
        },
        devices: args.devices,
        slots: args.max_tenants.into(),
        without: args.without.iter().copied().map(Into::into).collect(),
        state: args.state.clone(),
        run: args.run.clone(),
        kubelet: args.kubelet.clone(),
        cdi: args.cdi.clone(),
        listen: args.listen.0,
        resource: roommate_kube::names::RESOURCE.into(),
        program: THIS_PROGRAM.into(),
    };
    console::say(&format!("node {}", args.node_name));
    let told = &mut |what: &str| console::say_lines(what);
    runtime()?.block_on(agent::run(options, until(wanted), told))?;
    Ok(ExitCode::SUCCESS)
}

/// Waits until the process is asked to end.
async fn until(wanted: Arc<AtomicBool>) {
    while !wanted.load(Ordering::Relaxed) {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

fn print_crds() -> anyhow::Result<ExitCode> {
    console::print(&crd::yaml())?;
    Ok(ExitCode::SUCCESS)
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
