//! `roommate ui`: the dashboard of a daemon, or of journals, in a browser on this machine.

use crate::cli::machine::Ui;
use crate::{command, console};
use roommate_agent::Client;
use roommate_agent::api::control::{Request, Submit};
use roommate_agent::api::dashboard::viewer::{Recording, Shown, Viewer};
use roommate_agent::api::job_file::JobFile;
use roommate_agent::process::signal;
use roommate_core::journal::metrics::Fold;
use roommate_core::journal::timeline::{Line, Timeline};
use std::path::Path;
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::Ordering;
use std::time::Duration;

pub(super) fn run(args: &Ui) -> anyhow::Result<ExitCode> {
    let shown = if args.journals.is_empty() {
        let client = super::machine::client(&args.at)?;
        // Says what to do where no daemon runs.
        client.ask(&Request::Machine {})?;
        daemon(client)
    } else {
        let read = args.journals.iter().map(|path| recording(path));
        Shown::Journals(read.collect::<anyhow::Result<_>>()?)
    };
    let wanted = signal::end_wanted()?;
    let viewer = Viewer::at(args.listen, shown)?;
    let link = viewer.link();
    console::print(&format!("{link}\n"))?;
    if !args.no_open && open(&link) {
        console::say("opened in the browser; Ctrl-C ends");
    } else {
        console::say("open this address in a browser on this machine; Ctrl-C ends");
    }
    std::thread::Builder::new().name("page".into()).spawn(move || viewer.serve())?;
    while !wanted.load(Ordering::Relaxed) {
        std::thread::sleep(Duration::from_millis(50));
    }
    Ok(ExitCode::SUCCESS)
}

fn daemon(client: Client) -> Shown {
    let prepare = |file: JobFile| -> Submit {
        super::submit::submission(file, false, &super::submit::Environment::default())
    };
    Shown::Daemon(client, Box::new(prepare))
}

/// Reads a journal as the page shows it, with what its engine believed.
fn recording(path: &Path) -> anyhow::Result<Recording> {
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
