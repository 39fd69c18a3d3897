//! The command line.

pub(crate) mod help;
pub(crate) mod machine;

use clap::{Args, Parser, Subcommand, ValueEnum};
use roommate_core::cluster::Cluster;
use roommate_sim::compat::COMPATS;
use roommate_sim::trace::{self, synth};
use roommate_sim::truth::TRUTHS;
use std::ops::Range;
use std::path::PathBuf;

/// Share GPUs between training jobs and inference services so that neither notices.
#[derive(Parser, Debug)]
#[command(version, about, max_term_width = 100, subcommand_required = true)]
pub(crate) struct Cli {
    #[command(subcommand)]
    pub(crate) command: Command,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Command {
    /// Run a trace through one policy in virtual time
    Sim(Sim),
    /// Run a trace through several policies side by side
    Compare(Compare),
    /// Compare policies with the best that could have been done
    Oracle(Oracle),
    /// Decide a journal again and check that the decisions are the same
    Replay(Replay),
    /// Predict a recorded run from measured profiles, and compare
    Predict(Predict),
    /// Say of one job why it waited, where it ran, who preempted it
    Explain(Explain),
    /// List the policies, or describe one with its parameters
    Policies(Policies),
    /// Read, describe, convert and generate traces
    #[command(subcommand)]
    Trace(Trace),
    /// Measure tasks alone and side by side, and say how to share
    #[command(subcommand)]
    Profile(Profile),
    /// Turn journals into one self-contained HTML page
    Report(Report),
    /// Start the daemon that runs submitted jobs on this machine
    Up(machine::Up),
    /// Submit jobs to the daemon
    Submit(machine::Submit),
    /// Watch devices, jobs and the queue, and act on them
    Top(machine::Top),
    /// List the daemon's jobs
    Ps(machine::Ps),
    /// Describe one job, or the machine
    Describe(machine::Describe),
    /// Show what a job prints
    Logs(machine::Logs),
    /// Cancel jobs
    Cancel(machine::OnJobs),
    /// Suspend jobs where they are
    Suspend(machine::OnJobs),
    /// Resume suspended jobs
    Resume(machine::OnJobs),
    /// Change the batch size or the share of a job while it runs
    Resize(machine::Resize),
    /// List what happened on the machine
    Events(machine::Events),
    /// Stop the daemon
    Down(machine::Down),
    /// Run a mix of jobs in the foreground, and report on it
    Run(machine::Run),
    #[command(hide = true)]
    Keeper(machine::Keeper),
    #[command(hide = true)]
    GpuTest(machine::GpuTest),
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Output {
    /// For people
    Table,
    /// One JSON document
    Json,
    /// Comma-separated values with a header
    Csv,
}

/// Which trace to read, and how.
#[derive(Args, Debug, Clone, PartialEq)]
pub(crate) struct TraceInput {
    /// Layout of the trace
    #[arg(long, default_value_t = trace::Format::Auto, value_parser = format_parser(), hide_default_value = true)]
    pub(crate) format: trace::Format,
    /// Drop rows that are wrong, and jobs that can never run, and count them
    #[arg(long)]
    pub(crate) skip_bad_rows: bool,
    /// Table of steps per second, or of models, for traces that give steps without durations (gavel,
    /// synergy)
    #[arg(long, value_name = "FILE")]
    pub(crate) throughputs: Option<PathBuf>,
    /// Table of speeds by CPU and host memory for each GPU: columns `model,cpus,mem_gb,rel_throughput`
    #[arg(long, value_name = "FILE")]
    pub(crate) sensitivity: Option<PathBuf>,
    /// The GPU kind of that table that counts as the reference
    #[arg(long, default_value = "v100", value_name = "KIND")]
    pub(crate) gpu_model: String,
    /// Read only the first so many jobs
    #[arg(long, value_name = "N", value_parser = some)]
    pub(crate) max_jobs: Option<usize>,
}

fn format_parser() -> impl clap::builder::TypedValueParser<Value = trace::Format> {
    use clap::builder::TypedValueParser as _;
    let names = trace::Format::ALL.iter().map(|f| f.name());
    clap::builder::PossibleValuesParser::new(names)
        .map(|s| s.parse::<trace::Format>().expect("clap has checked the name"))
}

fn compat_parser() -> clap::builder::PossibleValuesParser {
    let values = COMPATS.iter().map(|c| clap::builder::PossibleValue::new(c.name).help(c.summary));
    values.collect::<Vec<_>>().into()
}

fn truth_parser() -> clap::builder::PossibleValuesParser {
    let values = TRUTHS.iter().map(|t| clap::builder::PossibleValue::new(t.name).help(t.summary));
    values.collect::<Vec<_>>().into()
}

/// The world to simulate.
#[derive(Args, Debug, Clone, PartialEq)]
pub(crate) struct WorldArgs {
    /// Nodes x GPUs of each, with kinds: 8x8 or 8x8:v100,4x8:a100/80g; `:96c:500g` adds CPU cores and
    /// GiB of memory of a node
    #[arg(long, default_value = "8x8", value_parser = cluster)]
    pub(crate) cluster: Cluster,
    /// Use the rules of a published simulator
    #[arg(long, value_name = "NAME", value_parser = compat_parser())]
    pub(crate) compat: Option<String>,
    /// How roommates really disturb each other
    #[arg(long, default_value = TRUTHS[0].name, conflicts_with = "compat")]
    #[arg(value_parser = truth_parser())]
    pub(crate) truth: String,
    /// Measurements for --truth measured|utilization: files that begin so, or a folder; ours, unless given
    #[arg(long, value_name = "PREFIX", conflicts_with = "compat")]
    pub(crate) measurements: Option<PathBuf>,
    /// Speeds of pairs for --truth table: columns `a,b,speed_a,speed_b`, or Gavel's or Lucid's table
    #[arg(long, value_name = "FILE", conflicts_with = "compat", required_if_eq("truth", "table"))]
    pub(crate) pairs: Option<PathBuf>,
    /// Speeds of pairs that policies know: the file of --throughputs, or a table as for --pairs
    #[arg(long, value_name = "FILE", conflicts_with = "compat")]
    pub(crate) known_pairs: Option<PathBuf>,
    /// Scatter of the truth around what its model says, as a share
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = chance, conflicts_with = "compat")]
    pub(crate) truth_noise: f64,
    /// Seed of all randomness
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Seconds without progress when a job starts again
    #[arg(long, default_value_t = 62.0, value_name = "S", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) restart_cost: f64,
    /// Seconds without progress when a suspended job goes on where it was
    #[arg(long, default_value_t = 1.0, value_name = "S", value_parser = seconds)]
    pub(crate) resume_cost: f64,
    /// Seconds without progress when a job is moved; as a restart, unless given
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(crate) migrate_cost: Option<f64>,
    /// Seconds without progress when a job's knobs are turned
    #[arg(long, default_value_t = 0.0, value_name = "S", value_parser = seconds)]
    pub(crate) tune_cost: f64,
    /// Seconds without progress at the first start
    #[arg(long, default_value_t = 0.0, value_name = "S", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) start_cost: f64,
    /// Let gangs run as fast spread over nodes as they do together
    #[arg(long)]
    pub(crate) no_spread_penalty: bool,
    /// Mean hours between failures of a node; nodes do not fail unless given
    #[arg(long, value_name = "H", value_parser = hours, allow_negative_numbers = true)]
    pub(crate) node_mtbf: Option<f64>,
    /// Mean hours until a failed node is back
    #[arg(long, default_value_t = 1.0, value_name = "H", value_parser = hours, allow_negative_numbers = true)]
    pub(crate) node_repair: f64,
    /// Chance that an attempt of a job crashes
    #[arg(long, default_value_t = 0.0, value_name = "P", value_parser = chance, allow_negative_numbers = true)]
    pub(crate) crash: f64,
    /// Part of those failures that are errors of the user, which come back at the same point
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = chance, allow_negative_numbers = true)]
    pub(crate) user_errors: f64,
    /// How often a job is started again after failures of its own
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub(crate) retries: u16,
    /// How often after an error of the user; as often as after others, unless given
    #[arg(long, value_name = "N")]
    pub(crate) user_retries: Option<u16>,
    /// Minutes between checkpoints; a crash loses what came after the last
    #[arg(long, default_value_t = 30.0, value_name = "MIN", value_parser = seconds, allow_negative_numbers = true)]
    pub(crate) checkpoint: f64,
    /// Seconds of a measuring window of services
    #[arg(long, default_value_t = 10.0, value_name = "S", value_parser = window)]
    pub(crate) window: f64,
    /// Simulate every request of the run, instead of repeating windows that were simulated under the same
    /// conditions
    #[arg(long)]
    pub(crate) exact_requests: bool,
    /// Count only these jobs, by order of submission, and end with the last of them: 4000:5000
    #[arg(long, value_name = "FROM:TO", value_parser = range)]
    pub(crate) measure: Option<Range<u32>>,
}

#[derive(Args, Debug)]
pub(crate) struct Sim {
    /// The trace, `-` for standard input, or a scenario (.toml); without one, a small invented trace
    pub(crate) trace: Option<PathBuf>,
    /// The policy
    #[arg(long, short, default_value = "tiresias")]
    pub(crate) policy: String,
    /// Set a parameter of the policy: name=value, the value as JSON or plain text
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) input: TraceInput,
    #[command(flatten)]
    pub(crate) world: WorldArgs,
    /// Write everything that happened here (JSON lines; compressed if it ends in .gz)
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// Also draw who was on which GPU
    #[arg(long)]
    pub(crate) gantt: bool,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Compare {
    /// The trace, `-` for standard input, or a scenario (.toml); without one, a small invented trace
    pub(crate) trace: Option<PathBuf>,
    /// The policies, separated by commas, or `all`; those of the scenario, or one of each family, unless
    /// given
    #[arg(long, short, visible_alias = "policy", value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) policies: Vec<String>,
    /// Sort by this figure, named as in CSV; by mean completion time (`avg_jct_s`), unless given
    #[arg(long, value_name = "FIGURE")]
    pub(crate) sort: Option<String>,
    /// Print all figures of every policy, not only those that are asked for most
    #[arg(long)]
    pub(crate) wide: bool,
    /// Set a parameter of one policy: policy.name=value
    #[arg(long = "set", value_name = "POLICY.NAME=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) input: TraceInput,
    #[command(flatten)]
    pub(crate) world: WorldArgs,
    /// Seeds of a scenario: 0 up to this; as many as it says, unless given
    #[arg(long, value_name = "N", value_parser = some)]
    pub(crate) seeds: Option<usize>,
    /// Simulations at the same time; as many as there are cores, unless given
    #[arg(long, short, value_name = "N", value_parser = some)]
    pub(crate) jobs: Option<usize>,
    /// Write a journal for each policy into this folder
    #[arg(long, value_name = "DIR")]
    pub(crate) journals: Option<PathBuf>,
    /// Write an HTML report
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Oracle {
    /// The scenario, with an [oracle] section
    pub(crate) scenario: PathBuf,
    /// Seeds: 0 up to this; as many as the scenario says, unless given
    #[arg(long, value_name = "N", value_parser = some)]
    pub(crate) seeds: Option<usize>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Replay {
    /// The journals, `-` for standard input
    #[arg(required = true)]
    pub(crate) journals: Vec<PathBuf>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Explain {
    /// Name of the job
    pub(crate) job: String,
    /// The journal to look in; that of the daemon, unless given
    #[arg(long, short, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) at: machine::At,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Policies {
    /// Describe this one
    pub(crate) name: Option<String>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Report {
    /// The journals
    #[arg(required = true)]
    pub(crate) journals: Vec<PathBuf>,
    /// The page to write
    #[arg(long, short, value_name = "FILE", default_value = "report.html")]
    pub(crate) output: PathBuf,
    /// Its title
    #[arg(long, default_value = "Roommate")]
    pub(crate) title: String,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Trace {
    /// Say what the Philly study says of a trace: sizes, durations, arrivals, load, failures
    Stats {
        /// The trace, `-` for standard input
        trace: PathBuf,
        #[command(flatten)]
        input: TraceInput,
        /// The cluster, for the load
        #[arg(long, value_parser = cluster)]
        cluster: Option<Cluster>,
        /// How to print the result
        #[arg(long, short, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Reproduce the tables of the Philly study: queueing, locality, utilisation, failures
    Study {
        /// The trace, `-` for standard input
        trace: PathBuf,
        #[command(flatten)]
        input: TraceInput,
        /// GPUs that a team is entitled to, to tell waiting for quota from fragmentation
        #[arg(long, value_name = "TEAM=GPUS,...", value_delimiter = ',', value_parser = quota)]
        quota: Vec<(String, u32)>,
        /// Also write an HTML page with plots
        #[arg(long, value_name = "FILE")]
        report: Option<PathBuf>,
        /// How to print the result
        #[arg(long, short, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Invent a trace from published mixes of sizes and durations
    Synth(Synth),
    /// Write a trace in Roommate's own layout
    Convert {
        /// The trace, `-` for standard input
        trace: PathBuf,
        #[command(flatten)]
        input: TraceInput,
        /// Where to; a name with .jsonl gets JSON lines, .gz is compressed
        #[arg(long, short, value_name = "FILE", default_value = "-")]
        output: PathBuf,
    },
}

#[derive(Subcommand, Debug)]
pub(crate) enum Profile {
    /// Measure commands that use the SDK alone over batch sizes and SMs, and side by side
    Measure(Measure),
    /// Say of every measured set how it is run best, or that it is not worth it
    Advise(Advise),
    /// Fit tasks alone and beside others, and say how well that tells what was left out
    Fit {
        /// The measurements: every file PREFIX*.jsonl, or every .jsonl file of a folder
        prefix: PathBuf,
        /// How to print the result
        #[arg(long, short, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Compare what a simulation would be told with measured pairs
    Check {
        /// The measurements: every file PREFIX*.jsonl, or every .jsonl file of a folder
        prefix: PathBuf,
        /// The pairs, `-` for standard input
        pairs: PathBuf,
        /// How to print the result
        #[arg(long, short, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
}

#[derive(Args, Debug)]
pub(crate) struct Predict {
    /// The journal of a machine (`roommate run --journal`), plain or compressed, `-` for standard input
    pub(crate) journal: PathBuf,
    /// The measurements: every file PREFIX*.jsonl, or every .jsonl file of a folder
    #[arg(long, value_name = "PREFIX")]
    pub(crate) profiles: PathBuf,
    /// Seconds that a job takes beside its steps: from its launch to the first, and from the last to its end;
    /// what was measured of its kind, unless given
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(crate) start: Option<f64>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Measure {
    /// The plan: commands, batch sizes, SMs and sets
    #[arg(required_unless_present = "example", requires = "out")]
    pub(crate) plan: Option<PathBuf>,
    /// Where rows go: PREFIX.jsonl, and PREFIX-services.jsonl for services beside training. What is there
    /// already is not measured again
    #[arg(long, value_name = "PREFIX")]
    pub(crate) out: Option<PathBuf>,
    /// Measure everything anew, and replace what is there of it
    #[arg(long)]
    pub(crate) again: bool,
    /// Print a plan that shows every field
    #[arg(long, conflicts_with_all = ["plan", "out", "again"])]
    pub(crate) example: bool,
}

#[derive(Args, Debug)]
pub(crate) struct Advise {
    /// The measurements: every file PREFIX*.jsonl, or every .jsonl file of a folder
    pub(crate) prefix: PathBuf,
    /// How many times as long a step may take as alone
    #[arg(long, value_name = "TIMES", default_value_t = 1.5, value_parser = at_least_one)]
    pub(crate) bound: f64,
    /// What a set has to come to, with 1 = one task at a time
    #[arg(long, value_name = "SUM", default_value_t = 1.1, value_parser = at_least_one)]
    pub(crate) least: f64,
    /// What a split may get done less than no split, as a share of that
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = chance)]
    pub(crate) loss: f64,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Synth {
    /// How many jobs
    #[arg(long, short = 'n', default_value_t = 1_000, value_parser = some)]
    pub(crate) jobs: usize,
    /// Seed
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// How jobs arrive
    #[arg(long, default_value = "poisson", value_parser = named::<synth::Arrivals>)]
    pub(crate) arrivals: synth::Arrivals,
    /// Sizes and durations: small, philly, helios, pai or tiresias
    #[arg(long, default_value = "philly", value_parser = named::<synth::Mix>)]
    pub(crate) mix: synth::Mix,
    /// GPU time asked for, as a share of what the cluster has
    #[arg(long, default_value_t = 0.9, allow_negative_numbers = true)]
    pub(crate) load: f64,
    /// Share of jobs that can use two or four times the GPUs they ask for
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) elastic: f64,
    /// The cluster that the load refers to
    #[arg(long, default_value = "8x8", value_parser = cluster)]
    pub(crate) cluster: Cluster,
    /// Where to; a name with .jsonl gets JSON lines, .gz is compressed
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub(crate) output: PathBuf,
}

/// The world and the input of somebody who asked for nothing.
pub(crate) fn defaults() -> (WorldArgs, TraceInput) {
    match Cli::parse_from(["roommate", "sim"]).command {
        Command::Sim(sim) => (sim.world, sim.input),
        _ => unreachable!("`sim` was asked for"),
    }
}

fn named<T: std::str::FromStr>(text: &str) -> Result<T, String>
where
    T::Err: std::fmt::Display,
{
    text.parse().map_err(|e: T::Err| e.to_string())
}

fn number(text: &str, holds: impl Fn(f64) -> bool, what: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|v| v.is_finite() && holds(*v));
    value.ok_or_else(|| format!("expected {what}"))
}

/// How many of something; the limit keeps a typing error from filling the memory.
fn some(text: &str) -> Result<usize, String> {
    let value = text.parse().ok().filter(|n| (1..=10_000_000).contains(n));
    value.ok_or_else(|| "expected a whole number from 1 to 10000000".into())
}

/// A team and its GPUs. The last `=` counts: names may hold any character.
fn quota(text: &str) -> Result<(String, u32), String> {
    let pair = text.rsplit_once('=').filter(|(team, _)| !team.is_empty());
    let pair = pair.and_then(|(team, gpus)| Some((team.to_owned(), gpus.parse().ok()?)));
    pair.ok_or_else(|| "expected a team and its GPUs, like vision=64".into())
}

pub(crate) fn seconds(text: &str) -> Result<f64, String> {
    number(text, |v| (0.0..=1e9).contains(&v), "a number from 0 to 1e9")
}

fn window(text: &str) -> Result<f64, String> {
    number(text, |v| (0.1..=86_400.0).contains(&v), "a number from 0.1 to 86400")
}

fn hours(text: &str) -> Result<f64, String> {
    number(text, |v| v > 0.0 && v <= 1e9, "a number above 0, at most 1e9")
}

fn at_least_one(text: &str) -> Result<f64, String> {
    number(text, |v| (1.0..=1e6).contains(&v), "a number from 1 to 1e6")
}

pub(crate) fn chance(text: &str) -> Result<f64, String> {
    number(text, |v| (0.0..=1.0).contains(&v), "a number from 0 to 1")
}

/// Jobs from the first number up to, but not including, the second.
fn range(text: &str) -> Result<Range<u32>, String> {
    let ends = text.split_once(':').and_then(|(a, b)| Some((a.parse().ok()?, b.parse().ok()?)));
    let range = ends.map(|(from, to)| from..to).filter(|r: &Range<u32>| !r.is_empty());
    range.ok_or_else(|| "expected FROM:TO such as 4000:5000, FROM below TO".into())
}

fn cluster(text: &str) -> Result<Cluster, String> {
    text.parse().map_err(|e: roommate_core::cluster::ClusterError| e.what)
}
