//! `roommate kube`: the commands for Kubernetes.

mod screens;
mod user;
mod what_if;

use crate::cli::Output;
use crate::cli::kube::{Agent, Bench, Front, Fuzz, Kube, Scheduler, Webhook};
use crate::{ANSWER_NO, console, experiment, table};
use anyhow::{Context, anyhow};
use roommate_agent::device::Kind;
use roommate_agent::process::{THIS_PROGRAM, signal};
use roommate_agent::protocol::front::{FrontSpec, Objective, ServerSpec};
use roommate_core::policy::Params;
use roommate_core::state::Costs;
use roommate_core::time::Span;
use roommate_ingress::spec::Spec;
use roommate_kube::scheduler::{Election, Options};
use roommate_kube::webhook::Certificate;
use roommate_kube::world::Settings;
use roommate_kube::{agent, bench, crd, fuzz, request, scheduler, webhook};
use serde_json::Value;
use std::process::ExitCode;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

pub(super) fn run(command: Kube) -> anyhow::Result<ExitCode> {
    match command {
        Kube::Scheduler(args) => schedule(&args),
        Kube::Agent(args) => attend(&args),
        Kube::Front(args) => stand_in_front(args),
        Kube::Crds => print_crds(),
        Kube::Webhook(args) => admit(&args),
        Kube::User(command) => user::run(command),
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
        dashboard: args.dashboard.0,
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

/// Runs the front of a service in its pod. What a flag does not say a variable does, as the
/// controller of services sets it.
fn stand_in_front(args: Front) -> anyhow::Result<ExitCode> {
    let variable = |name: &str| std::env::var(name).ok().filter(|v| !v.is_empty());
    let number = |name: &'static str| {
        let parse =
            |text: String| text.parse::<u32>().with_context(|| format!("${name}: {text:?}"));
        variable(name).map(parse).transpose()
    };
    let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = host.trim().to_string();
    let Some(text) = args.objective.or_else(|| variable("ROOMMATE_OBJECTIVE")) else {
        return Err(console::advise("no objective is given", "give --objective p99=25ms"));
    };
    let objective = request::objective(&text).map_err(|why| anyhow!("--objective: {why}"))?;
    let port = u16::try_from(number("ROOMMATE_PORT")?.unwrap_or(8000)).context("$ROOMMATE_PORT")?;
    let server = match (args.http_health, args.http_port) {
        (Some(health), port) => ServerSpec::Http { port: port.unwrap_or(0), health },
        (None, _) => ServerSpec::Sdk {},
    };
    let spec = FrontSpec {
        name: host.clone(),
        model: args.model.or_else(|| variable("ROOMMATE_MODEL")).unwrap_or(host),
        listen: args.listen.unwrap_or_else(|| ([0, 0, 0, 0], port).into()),
        objective: Objective { quantile: 0.99, ms: f64::from(objective.p99_us) / 1e3 },
        max_batch: args.max_batch.or(number("ROOMMATE_MAX_BATCH")?).unwrap_or(32),
        fill_ms: None,
        queue: 1024,
        server,
    };
    let spec = Spec::read(&serde_json::to_string(&spec)?).map_err(anyhow::Error::msg)?;
    Ok(roommate_ingress::run(spec, &args.command).into())
}

fn print_crds() -> anyhow::Result<ExitCode> {
    console::print(&crd::yaml())?;
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
