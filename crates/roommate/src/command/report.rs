//! `roommate report`: renders journals as one HTML page.

use crate::atomic::{self, AtomicFile};
use crate::cli::Report;
use crate::console;
use roommate_sim::report;
use roommate_sim::report::view::View;
use std::process::ExitCode;

pub(super) fn run(args: &Report) -> anyhow::Result<ExitCode> {
    let mut views: Vec<report::RunView> = Vec::new();
    args.journals.iter().try_for_each(|path| atomic::keep_apart(path, &args.output))?;
    for path in &args.journals {
        let mut view = View::default();
        super::read_journal(path, &mut view)?;
        let policy = view.policy().to_string();
        let same = views.iter().filter(|v| v.policy == policy).count();
        let label = if same == 0 { policy } else { format!("{policy} ({})", same + 1) };
        views.push(view.finish(&label, &path.display().to_string()));
    }
    AtomicFile::create(&args.output)?.fill(&report::render(&args.title, &views))?;
    console::say(&format!("report: {}", args.output.display()));
    Ok(ExitCode::SUCCESS)
}
