//! The commands for users of a cluster: what they ask of the API server and of the scheduler.

use super::super::ui::{recording, serve};
use super::{runtime, screens, until, what_if};
use crate::cli::kube::{
    Explain, Namespace, OnPod, Resize, Shown as Format, Snapshot, SnapshotArgs, Ui, User, Who,
};
use crate::{ANSWER_NO, console, table};
use anyhow::Context;
use roommate_agent::api::dashboard::feed::Watched as _;
use roommate_agent::api::dashboard::viewer::{Live, Shown};
use roommate_agent::process::signal;
use roommate_core::journal;
use roommate_core::journal::explain;
use roommate_kube::board::Board;
use roommate_kube::client::{self, Access, Client, Failure};
use roommate_kube::snapshot;
use roommate_kube::story::{Story, name_in_journal};
use roommate_kube::view::{self, View};
use serde::Serialize;
use serde_json::json;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

/// What to do where no scheduler answers.
const UNREACHED: &str = "--scheduler ADDRESS names one that can be reached from here, --snapshot FILE \
                         a snapshot that was saved before, --lease the lease of another installation";

pub(super) fn run(command: User) -> anyhow::Result<ExitCode> {
    match command {
        User::Top(args) => runtime()?.block_on(top(&args)),
        User::Queue(args) => runtime()?.block_on(queue(&args)),
        User::Why(args) => runtime()?.block_on(why(&args)),
        User::Explain(args) => runtime()?.block_on(explain(&args)),
        User::Resize(args) => runtime()?.block_on(resize(&args)),
        User::WhatIf(args) => runtime()?.block_on(what_if::run(&args)),
        User::Snapshot(args) => runtime()?.block_on(print_snapshot(&args)),
        User::Ui(args) => ui(&args),
    }
}

/// A client of the API server, and the namespace that is meant.
pub(super) async fn reach(at: &Namespace) -> anyhow::Result<(Client, String)> {
    let (client, usual) = client::client_in(&at.cluster.access()).await?;
    Ok((client, at.namespace.clone().unwrap_or(usual)))
}

async fn view(args: &Who) -> anyhow::Result<(Client, View)> {
    let client = client::client(&args.cluster.access()).await?;
    let view = View::read(&client, args.namespace.as_deref()).await;
    let view = view.map_err(|error| match &args.namespace {
        None if error.to_string().contains("(403)") => {
            console::advise(error.to_string(), "-n NAMESPACE shows the pods of one namespace")
        }
        _ => error.into(),
    })?;
    Ok((client, view))
}

async fn top(args: &Who) -> anyhow::Result<ExitCode> {
    let (client, mut view) = view(args).await?;
    // Without the right to read nodes there are still pods.
    match view.clone().with_nodes(&client).await {
        Ok(with) => view = with,
        Err(error) => console::say_lines(&format!("note: idle GPUs are not shown: {error}")),
    }
    match args.output {
        Format::Json => print_json(&view)?,
        shown => {
            console::print(&screens::top(&view, shown == Format::Wide))?;
            console::say(&screens::summary(&view));
        }
    }
    Ok(ExitCode::SUCCESS)
}

async fn queue(args: &Who) -> anyhow::Result<ExitCode> {
    let (_, view) = view(args).await?;
    match args.output {
        Format::Json => print_json(&view.waiting)?,
        _ if view.waiting.is_empty() => console::say("no pod waits for GPUs"),
        shown => console::print(&screens::queue(&view.waiting, shown == Format::Wide))?,
    }
    Ok(ExitCode::SUCCESS)
}

async fn why(args: &OnPod) -> anyhow::Result<ExitCode> {
    let (client, namespace) = reach(&args.at).await?;
    let story = Story::read(&client, &namespace, &args.pod).await;
    let story = story.map_err(|failure| no_pod(&failure, &namespace, &args.pod))?;
    match args.output {
        Format::Json => print_json(&story)?,
        _ => console::print(&screens::story(&story))?,
    }
    Ok(ExitCode::SUCCESS)
}

fn no_pod(failure: &Failure, namespace: &str, pod: &str) -> anyhow::Error {
    let what = format!("pod {namespace}/{pod}: {failure}");
    match failure.code {
        404 => console::advise(what, "-n NAMESPACE says in which namespace it is"),
        403 => console::advise(what, "ask for the right to read and patch pods of this namespace"),
        _ => anyhow::anyhow!(what),
    }
}

async fn resize(args: &Resize) -> anyhow::Result<ExitCode> {
    let (client, namespace) = reach(&args.at).await?;
    let Resize { pod, percent, .. } = args;
    let story = Story::read(&client, &namespace, pod).await;
    let story = story.map_err(|failure| no_pod(&failure, &namespace, pod))?;
    let resized = view::resize(&client, &namespace, pod, *percent).await;
    resized.map_err(|failure| no_pod(&failure, &namespace, pod))?;
    console::print(&format!("{namespace}/{pod}: at most {percent} % of each GPU\n"))?;
    if story.on.is_empty() {
        console::say("note: it is on no GPU now; the limit counts from its start on");
    }
    Ok(ExitCode::SUCCESS)
}

/// The snapshot: of a file, or of the scheduler.
pub(super) async fn snapshot_of(from: &SnapshotArgs, access: &Access) -> anyhow::Result<Vec<u8>> {
    if let Some(path) = &from.snapshot {
        let named = format!("could not read snapshot {:?}", path.display().to_string());
        return std::fs::read(path).context(named);
    }
    let client = client::client(access).await?;
    let fetched = snapshot::fetch(&client, access, &from.source()).await;
    fetched.map_err(|error| console::advise(error.to_string(), UNREACHED))
}

async fn print_snapshot(args: &Snapshot) -> anyhow::Result<ExitCode> {
    let journal = snapshot_of(&args.from, &args.cluster.access()).await?;
    console::print(&String::from_utf8_lossy(&journal))?;
    Ok(ExitCode::SUCCESS)
}

async fn explain(args: &Explain) -> anyhow::Result<ExitCode> {
    let wanted = match (args.pod.contains('/'), &args.from.snapshot) {
        (true, _) => args.pod.clone(),
        // A saved snapshot is explained without a cluster.
        (false, Some(_)) => {
            format!("{}/{}", args.at.namespace.as_deref().unwrap_or("default"), args.pod)
        }
        (false, None) => {
            let (client, namespace) = reach(&args.at).await?;
            name_in_journal(&client, &namespace, &args.pod).await
        }
    };
    let journal = snapshot_of(&args.from, &args.at.cluster.access()).await?;
    let mut story = explain::Explain::new(&wanted);
    journal::read(journal.as_slice(), &mut story).context("could not read the snapshot")?;
    if !story.found() {
        console::say_lines(&format!("the scheduler's journal has no pod {wanted}"));
        // A pod that replaced another one goes on under the name of the first.
        let (namespace, pod) = wanted.split_once('/').unwrap_or(("", &wanted));
        let stem = pod.rsplit_once('-').map_or(pod, |(stem, _)| stem);
        let stem = format!("{namespace}/{stem}");
        let mut siblings = explain::Explain::new(&stem);
        journal::read(journal.as_slice(), &mut siblings).context("could not read the snapshot")?;
        let similar: Vec<&str> = siblings.similar().take(5).collect();
        let hint = match similar[..] {
            [] => {
                "the journal begins when the nodes changed last; `why` asks the API server".into()
            }
            _ => format!("did you mean {}?", similar.join(", ")),
        };
        console::say_lines(&format!("hint: {hint}"));
        return Ok(ExitCode::from(ANSWER_NO));
    }
    if args.output == Format::Json {
        let moments = story.moments.iter();
        let moments: Vec<_> =
            moments.map(|m| json!({ "at_s": m.at.secs(), "what": m.what })).collect();
        print_json(&json!({ "pod": wanted, "moments": moments }))?;
    } else {
        let rows =
            story.moments.iter().map(|m| vec![format!("{:>8}", m.at.to_string()), m.what.clone()]);
        console::print(&screens::wrapped(&rows.collect::<Vec<_>>(), table::GAP))?;
    }
    Ok(ExitCode::SUCCESS)
}

fn ui(args: &Ui) -> anyhow::Result<ExitCode> {
    let wanted = signal::end_wanted()?;
    let runtime = runtime()?;
    let shown = if let Some(path) = &args.from.snapshot {
        Shown::Journals(vec![recording(path)?])
    } else {
        let access = args.cluster.access();
        let client = runtime.block_on(client::client(&access))?;
        let handle = runtime.handle().clone();
        let board = Arc::new(Board::of(client, access, args.from.source(), handle));
        let shown = Shown::Live(Arc::clone(&board) as Arc<dyn Live>);
        // Threads ask, while this one carries out what they ask for.
        let asked = std::thread::spawn(move || board.world().map(|_| ()));
        runtime.block_on(async {
            while !asked.is_finished() {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        });
        let answered = asked.join().map_err(|_| anyhow::anyhow!("the scheduler was not asked"))?;
        answered.map_err(|error| console::advise(error.to_string(), UNREACHED))?;
        shown
    };
    serve(&args.page, shown)?;
    runtime.block_on(until(wanted));
    Ok(ExitCode::SUCCESS)
}

/// Prints a JSON document.
pub(super) fn print_json(what: &impl Serialize) -> anyhow::Result<()> {
    console::print(&(serde_json::to_string_pretty(what)? + "\n"))
}
