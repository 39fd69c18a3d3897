//! The statistics as text, aligned and readable without colour.

use super::{Share, Stats, Summary};
use std::fmt::{self, Display, Formatter};

/// Width of the row names of time tables.
const NAME: usize = 24;
/// Width of the row names of share tables: model names are long.
const SHARE_NAME: usize = 34;

impl Display for Stats {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write_head(f)?;
        if self.jobs == 0 {
            return Ok(());
        }
        self.write_sizes(f)?;
        self.write_times(f)?;
        self.write_arrivals(f)?;
        write_shares(f, "outcome", &self.statuses, 0)?;
        if let Some(attempts) = self.mean_attempts {
            writeln!(f, "{:<NAME$}{attempts:>9.2}", "attempts, mean")?;
        }
        write_shares(f, "team", &self.teams, self.team_count)?;
        write_shares(f, "model", &self.models, self.model_count)
    }
}

impl Stats {
    fn write_head(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let mut line = |name: &str, value: String| writeln!(f, "{name:<NAME$}{value:>9}");
        line("format", self.format.to_string())?;
        line("jobs", grouped(self.jobs))?;
        for (name, jobs) in [
            ("rows dropped", self.dropped),
            ("CPU jobs left out", self.cpu_jobs),
            ("with a deadline", self.with_deadline),
            ("best effort", self.best_effort),
        ] {
            if jobs > 0 {
                line(name, grouped(jobs))?;
            }
        }
        if self.jobs > 0 {
            line("submitted within", time(self.span_s))?;
            line("GPU-hours", grouped(self.gpu_hours.round() as u64))?;
            line("GPUs per job, mean", format!("{:.2}", self.mean_gpus))?;
        }
        match self.offered_load {
            Some(load) => line("offered load", format!("{load:.2}")),
            None => Ok(()),
        }
    }

    fn write_sizes(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let classes: Vec<Share> = self.classes.iter().map(|class| class.share.clone()).collect();
        write_shares(f, "GPUs", &classes, 0)?;
        let beyond =
            if self.other_sizes > 0 { self.sizes.len() as u64 + self.other_sizes } else { 0 };
        write_shares(f, "GPUs, exactly", &self.sizes, beyond)
    }

    fn write_times(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write_summary_head(f, "duration")?;
        write_summary(f, "all", &self.duration_s)?;
        for class in &self.classes {
            write_summary(f, &gpus(&class.share.name), &class.duration_s)?;
        }
        if let Some(queue) = &self.queue_s {
            write_summary_head(f, "queueing")?;
            write_summary(f, "all", queue)?;
            for class in &self.classes {
                if let Some(queue) = &class.queue_s {
                    write_summary(f, &gpus(&class.share.name), queue)?;
                }
            }
        }
        Ok(())
    }

    fn write_arrivals(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Some(gap) = &self.gap_s else { return Ok(()) };
        write_summary_head(f, "arrivals")?;
        write_summary(f, "time between", gap)?;
        if let Some(burstiness) = self.burstiness {
            writeln!(
                f,
                "{:<NAME$}{burstiness:>8.1}  (1 = independent arrivals)",
                "  burstiness (CV)"
            )?;
        }
        if !self.hours.is_empty() {
            let name = if self.clock_hours { "  by hour of day" } else { "  by hour since start" };
            let most = self.hours.iter().max().copied().unwrap_or(0);
            let least = self.hours.iter().min().copied().unwrap_or(0);
            let bars: String = self.hours.iter().map(|n| bar(*n, most)).collect();
            writeln!(
                f,
                "{name:<NAME$} 0 {bars} 23  ({} to {} jobs)",
                grouped(least),
                grouped(most)
            )?;
        }
        Ok(())
    }
}

fn gpus(class: &str) -> String {
    format!("{class} GPU{}", if class == "1" { "" } else { "s" })
}

fn write_shares(f: &mut Formatter<'_>, what: &str, shares: &[Share], of: u64) -> fmt::Result {
    if shares.is_empty() {
        return Ok(());
    }
    writeln!(f, "\n{what:<SHARE_NAME$}{:>9} {:>9} {:>12}", "jobs", "of jobs", "of GPU time")?;
    for share in shares {
        let name = format!("  {}", fitted(&share.name));
        let jobs = grouped(share.jobs);
        let (of_jobs, of_time) = (percent(share.of_jobs), percent(share.of_gpu_time));
        writeln!(f, "{name:<SHARE_NAME$}{jobs:>9} {of_jobs:>9} {of_time:>12}")?;
    }
    let more = of.saturating_sub(shares.len() as u64);
    if more > 0 {
        writeln!(f, "  and {more} more")?;
    }
    Ok(())
}

fn write_summary_head(f: &mut Formatter<'_>, what: &str) -> fmt::Result {
    write!(f, "\n{what:<NAME$}")?;
    for name in ["mean", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max"] {
        write!(f, "{name:>8}")?;
    }
    writeln!(f)
}

fn write_summary(f: &mut Formatter<'_>, name: &str, s: &Summary) -> fmt::Result {
    write!(f, "{:<NAME$}", format!("  {name}"))?;
    for value in [s.mean, s.p10, s.p25, s.p50, s.p75, s.p90, s.p95, s.p99, s.max] {
        write!(f, "{:>8}", time(value))?;
    }
    writeln!(f)
}

/// Truncates a name to the width of its column.
pub(in crate::trace) fn fitted(name: &str) -> String {
    let room = SHARE_NAME - 3;
    match name.char_indices().nth(room) {
        Some(_) => name.chars().take(room - 1).chain(['…']).collect(),
        None => name.to_owned(),
    }
}

/// `12,345`
pub(in crate::trace) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut text = String::new();
    for (i, digit) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

pub(in crate::trace) fn percent(share: f64) -> String {
    // A rare value must not be printed like an absent one.
    match share * 100.0 {
        p if p > 0.0 && p < 0.01 => "<0.01 %".to_owned(),
        p if p > 0.0 && p < 0.95 => format!("{p:.2} %"),
        p => format!("{p:.1} %"),
    }
}

/// A duration in the largest unit that gives a number of at least 1, in at most eight columns.
pub(in crate::trace) fn time(seconds: f64) -> String {
    let (value, unit) = match seconds {
        s if s <= 0.0 => return "0 s".to_owned(),
        s if s < 1.0 => (s * 1e3, "ms"),
        s if s < 60.0 => (s, "s"),
        s if s < 3_600.0 => (s / 60.0, "min"),
        s if s < 86_400.0 => (s / 3_600.0, "h"),
        s => (s / 86_400.0, "d"),
    };
    if value < 9.95 { format!("{value:.1} {unit}") } else { format!("{value:.0} {unit}") }
}

fn bar(n: u64, most: u64) -> char {
    const BARS: [char; 8] = ['▁', '▂', '▃', '▄', '▅', '▆', '▇', '█'];
    BARS[(n * 7).div_ceil(most.max(1)).min(7) as usize]
}
