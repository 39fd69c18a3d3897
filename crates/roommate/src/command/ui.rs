//! `roommate ui`: the dashboard of a daemon, of journals or of simulations, in a browser on this
//! machine.

use super::compare::ALL;
use super::scenario;
use crate::cli::machine::{Page, Ui};
use crate::experiment::{Choice, Lab};
use crate::{cli, command, console};
use anyhow::Context;
use roommate_agent::Client;
use roommate_agent::api::control::{Request, Submit};
use roommate_agent::api::dashboard::viewer::{Keys, Recording, Shown, Viewer};
use roommate_agent::api::job_file::JobFile;
use roommate_agent::process::signal;
use roommate_core::journal::JournalError;
use roommate_core::journal::metrics::Fold;
use roommate_core::journal::timeline::{Line, Timeline};
use std::fs::File;
use std::io::Read as _;
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) fn run(args: &Ui) -> anyhow::Result<ExitCode> {
    let shown = if args.policies.is_empty() { recorded(args)? } else { simulated(args)? };
    let wanted = signal::end_wanted()?;
    serve(&args.page, shown)?;
    while !wanted.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(ExitCode::SUCCESS)
}

/// Serves the page in a thread until the process ends, and says where.
pub(super) fn serve(page: &Page, shown: Shown) -> anyhow::Result<()> {
    let viewer = Viewer::at(page.listen, shown, Keys::Own)?;
    let link = viewer.link();
    console::print(&format!("{link}\n"))?;
    if !page.no_open && open(&link) {
        console::say("opened in the browser; Ctrl-C ends");
    } else {
        console::say("open this address in a browser on this machine; Ctrl-C ends");
    }
    std::thread::Builder::new().name("page".into()).spawn(move || viewer.serve())?;
    Ok(())
}

/// The daemon, or journals.
fn recorded(args: &Ui) -> anyhow::Result<Shown> {
    let (world, input) = cli::defaults();
    if args.world != world || args.input != input {
        let what = "flags about cluster, truth, costs or traces are for simulations";
        return Err(console::advise(what, "name one or two policies: -p gandiva,roommate"));
    }
    if args.files.is_empty() {
        let client = super::machine::client(&args.at)?;
        // Says what to do where no daemon runs.
        client.ask(&Request::Machine {})?;
        return Ok(daemon(client));
    }
    let read = args.files.iter().map(|path| recording(path).map_err(|error| simulate(path, error)));
    Ok(Shown::Journals(read.collect::<anyhow::Result<_>>()?))
}

/// What to do with a trace where a journal is expected.
fn simulate(path: &Path, error: anyhow::Error) -> anyhow::Error {
    let begins_otherwise = error.downcast_ref::<JournalError>();
    if !matches!(begins_otherwise, Some(JournalError::Bad { line: 1, .. })) {
        return error;
    }
    let hint = format!("if it is a trace: roommate ui {} -p gandiva,roommate", path.display());
    console::advise(format!("{error:#}"), hint)
}

/// Simulations of a trace with one or two policies, as the journals that they write.
fn simulated(args: &Ui) -> anyhow::Result<Shown> {
    let trace = match args.files.as_slice() {
        [] => None,
        [trace] => Some(trace.as_path()),
        [..] => {
            let what = "--policies simulates one trace, not two";
            return Err(console::advise(what, "to show journals, leave out --policies"));
        }
    };
    if args.policies.len() > 2 || args.policies == [ALL] {
        let what = "--policies: two policies can be shown side by side, not more";
        return Err(console::advise(what, "`roommate compare` takes any number, and says which"));
    }
    if trace.is_some_and(scenario::is_one) {
        let what = "a scenario is not a trace";
        let hint = "`roommate sim FILE.toml -p NAME --journal X.jsonl`, then `roommate ui X.jsonl`";
        return Err(console::advise(what, hint));
    }
    let compat = args.world.compat.as_deref();
    let choose = |name: &String| Choice::new(name, compat, &[]);
    let choices = args.policies.iter().map(choose).collect::<anyhow::Result<Vec<_>>>()?;
    if trace.is_some_and(begins_as_journal) {
        let what = "this is a journal, which says what a policy has already done";
        return Err(console::advise(what, "leave out --policies, or name the trace"));
    }
    let lab = Lab::new(trace, &args.input, &args.world)?;
    console::say(&lab.title());
    let folder = tempfile::Builder::new().prefix("roommate-").tempdir();
    let folder = folder.context("could not make a folder")?;
    let recordings = choices.iter().enumerate().map(|(number, choice)| {
        let bar = super::progress_bar(lab.jobs(), choice.name());
        let journal = folder.path().join(format!("{number}.jsonl"));
        lab.run(choice, Some(&journal), &mut None::<Fold>, &mut |n| bar.set_position(n))?;
        bar.finish_and_clear();
        Ok(Recording { title: choice.name().into(), ..recording(&journal)? })
    });
    Ok(Shown::Journals(recordings.collect::<anyhow::Result<_>>()?))
}

fn begins_as_journal(path: &Path) -> bool {
    let mut first = [0; 8];
    let read = File::open(path).and_then(|mut file| file.read_exact(&mut first));
    read.is_ok() && first == *b"{\"head\":"
}

fn daemon(client: Client) -> Shown {
    let prepare = |file: JobFile| -> Submit {
        super::submit::submission(file, false, &super::submit::Environment::default())
    };
    Shown::Daemon(client, Box::new(prepare))
}

/// Reads a journal as the page shows it, with what its engine believed.
pub(super) fn recording(path: &Path) -> anyhow::Result<Recording> {
    let (mut timeline, mut metrics) = (Timeline::with_beliefs(), Fold::default());
    command::read_journal(path, &mut (&mut timeline, &mut metrics))?;
    let rows = metrics.metrics().rows();
    let rows = rows.iter().filter(|row| row.value.is_some()).map(serde_json::to_value);
    let file = path.file_stem().map_or_else(|| "journal".into(), |s| s.to_string_lossy());
    let policy = timeline.lines.iter().find_map(|line| match line {
        Line::Head(start) => Some(start.policy.clone()),
        _ => None,
    });
    let title = match policy {
        Some(policy) if !file.contains(&policy) => format!("{file} ({policy})"),
        _ => file.into_owned(),
    };
    let metrics = rows.collect::<Result<_, _>>()?;
    Ok(Recording { title, lines: timeline.lines, metrics })
}

/// Opens an address in the user's browser, if there is a screen.
fn open(link: &str) -> bool {
    let has_screen =
        ["DISPLAY", "WAYLAND_DISPLAY"].map(std::env::var_os).iter().any(Option::is_some);
    let mut browser = Command::new("xdg-open");
    let quiet = browser.arg(link).stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    has_screen && quiet.spawn().is_ok()
}
