//! The commands, one file each.

mod advise;
mod bound;
mod compare;
mod doctor;
mod events;
mod explain;
mod kube;
mod learned;
mod logs;
mod machine;
mod oracle;
mod policies;
mod predict;
mod profile;
mod replay;
mod report;
mod run;
mod scenario;
mod sim;
mod submit;
mod token;
mod top;
mod trace;
mod ui;
mod up;

use crate::cli::machine::At;
use crate::cli::{self, Command};
use crate::console;
use anyhow::Context;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use roommate_agent::api::control::Request;
use roommate_agent::process::rotated_file::Place;
use roommate_core::journal::{self, JournalError, Observer};
use roommate_ingress::spec::Spec;
use roommate_sim::trace::Problem;
use roommate_sim::trace::gzip;
use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

pub(crate) fn run(command: Command) -> anyhow::Result<ExitCode> {
    match command {
        Command::Sim(args) => sim::run(&args),
        Command::Compare(args) => compare::run(&args),
        Command::Advise(args) => advise::run(&args),
        Command::Bound(args) => bound::run(&args),
        Command::Oracle(args) => oracle::run(&args),
        Command::Replay(args) => replay::run(&args),
        Command::Predict(args) => predict::run(&args),
        Command::Explain(args) => explain::run(&args),
        Command::Policies(args) => policies::run(&args),
        Command::Trace(args) => trace::run(args),
        Command::Profile(command) => profile::run(command),
        Command::Report(args) => report::run(&args),
        Command::Up(args) => up::run(&args),
        Command::Submit(args) => submit::run(&args),
        Command::Top(args) => top::run(&args),
        Command::Ui(args) => ui::run(&args),
        Command::Ps(args) => machine::ps(&args),
        Command::Describe(args) => machine::describe(&args),
        Command::Logs(args) => logs::run(&args),
        Command::Cancel(args) => machine::each(&args, |job| Request::Cancel { job }),
        Command::Suspend(args) => machine::each(&args, |job| Request::Suspend { job }),
        Command::Resume(args) => machine::each(&args, |job| Request::Resume { job }),
        Command::Resize(args) => machine::resize(&args),
        Command::Events(args) => events::run(&args),
        Command::Down(args) => machine::down(&args),
        Command::Doctor(args) => doctor::run(&args),
        Command::Learned(args) => learned::run(&args),
        Command::Token(command) => token::run(command),
        Command::Run(args) => run::run(&args),
        Command::Kube(command) => kube::run(command),
        Command::Keeper(args) => up::keeper(&args),
        Command::Front(args) => {
            let spec = Spec::read(&args.spec).map_err(anyhow::Error::msg)?;
            Ok(roommate_ingress::run(spec, &args.command).into())
        }
        Command::GpuTest(args) => up::gpu_test(&args),
        Command::Man { folder } => {
            fs::create_dir_all(&folder)
                .and_then(|()| clap_mangen::generate_to(cli::help::command(), &folder))
                .with_context(|| format!("could not write pages into {}", folder.display()))?;
            Ok(ExitCode::SUCCESS)
        }
        Command::Completions { shell } => {
            let mut text = Vec::new();
            clap_complete::generate(shell, &mut cli::help::command(), "roommate", &mut text);
            console::print(&String::from_utf8_lossy(&text))?;
            Ok(ExitCode::SUCCESS)
        }
    }
}

/// Reads the whole journal of a daemon, with one observer for each of its segments.
fn read_own_journal<O: Observer>(at: &At, mut new: impl FnMut() -> O) -> anyhow::Result<Vec<O>> {
    let parts = machine::journal_parts(&machine::client(at)?, &mut Place::default())?;
    let mut read = Vec::new();
    for (_, part) in parts {
        let mut observer = new();
        journal::read(part.as_slice(), &mut observer)
            .context("could not read the daemon's journal")?;
        read.push(observer);
    }
    Ok(read)
}

/// Reads a journal file, plain or compressed, into an observer.
fn read_journal(path: &Path, to: &mut dyn Observer) -> anyhow::Result<()> {
    let plainly = |e: &io::Error| anyhow::anyhow!("{}", Problem::from(e));
    let from = gzip::open(path).map_err(|e| plainly(&e));
    let read = from.and_then(|from| {
        journal::read(from, to).map_err(|e| match e {
            JournalError::Io { line, error } => plainly(&error).context(format!("line {line}")),
            other => other.into(),
        })
    });
    read.with_context(|| unreadable(path))
}

fn unreadable(journal: &Path) -> String {
    format!("could not read journal {:?}", journal.display().to_string())
}

/// A progress bar over jobs; drawn only on a terminal.
fn progress_bar(jobs: usize, what: &str) -> ProgressBar {
    let bar = bar(jobs, "{msg:18} {bar:30} {human_pos}/{human_len} jobs {eta}");
    bar.set_message(what.to_string());
    bar
}

/// A progress bar over runs.
fn runs_bar(runs: usize) -> ProgressBar {
    bar(runs, "{bar:30} {human_pos}/{human_len} runs {eta} {msg}")
}

fn bar(length: usize, template: &str) -> ProgressBar {
    let target = if console::watched() {
        ProgressDrawTarget::stderr()
    } else {
        ProgressDrawTarget::hidden()
    };
    let bar = ProgressBar::with_draw_target(Some(length as u64), target);
    let style = ProgressStyle::with_template(template);
    bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    bar
}
