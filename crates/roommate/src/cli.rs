//! The command line.

pub(crate) mod help;
pub(crate) mod kube;
mod kubectl;
pub(crate) mod machine;

use clap::{Args, Parser, Subcommand, ValueEnum};
use roommate_core::cluster::Cluster;
use roommate_core::state::Costs;
use roommate_sim::advice;
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
    /// Say what another policy would have saved on a cluster's past
    Advise(AdviseTrace),
    /// Compute a mean completion time that no policy can beat on a trace
    Bound(Bound),
    /// Compare policies with the optimal schedule of a small scenario
    Oracle(Oracle),
    /// Replay a journal and check that the decisions are the same
    Replay(Replay),
    /// Predict a recorded run from measured profiles, and compare
    Predict(Predict),
    /// Explain why a job waited, where it ran and what preempted it
    Explain(Explain),
    /// List the policies, or describe one with its parameters
    Policies(Policies),
    /// Read, describe, convert and generate traces
    #[command(subcommand)]
    Trace(Trace),
    /// Measure tasks alone and colocated, and recommend how to share
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
    /// Open the dashboard of the daemon, or of journals, in a browser
    Ui(machine::Ui),
    /// List the daemon's jobs
    Ps(machine::Ps),
    /// Describe one job, or the machine
    Describe(machine::Describe),
    /// Print the output of a job
    Logs(machine::Logs),
    /// Cancel jobs
    Cancel(machine::OnJobs),
    /// Suspend jobs until they are resumed
    Suspend(machine::OnJobs),
    /// Resume suspended jobs
    Resume(machine::OnJobs),
    /// Change the batch size or the share of a job while it runs
    Resize(machine::Resize),
    /// List the events of the machine
    Events(machine::Events),
    /// Stop the daemon
    Down(machine::Down),
    /// Check the state of a daemon that does not run, and repair it
    Doctor(machine::Doctor),
    /// Show what was learned of kinds of work, or forget it
    Learned(machine::ShowLearned),
    /// Create, list and revoke tokens for HTTP
    #[command(subcommand)]
    Token(machine::Token),
    /// Run a mix of jobs in the foreground, and report on it
    Run(machine::Run),
    /// Share the GPUs of a Kubernetes cluster
    #[command(subcommand)]
    Kube(kube::Kube),
    #[command(hide = true)]
    Keeper(machine::Keeper),
    #[command(hide = true)]
    Front(machine::Front),
    #[command(hide = true)]
    GpuTest(machine::GpuTest),
    /// Write the pages of the manual into a folder
    Man {
        /// The folder
        folder: PathBuf,
    },
    /// Print completions for a shell
    Completions {
        /// The shell
        shell: clap_complete::Shell,
    },
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Output {
    /// Table as text
    Table,
    /// One JSON document
    Json,
    /// Comma-separated values with a header
    Csv,
}

/// The trace to read, and options of reading.
#[derive(Args, Debug, Clone, PartialEq)]
pub(crate) struct TraceInput {
    /// Format of the trace
    #[arg(long, default_value_t = trace::Format::Auto, value_parser = format_parser())]
    #[arg(hide_default_value = true)]
    pub(crate) format: trace::Format,
    /// Drop and count invalid rows and jobs that can never run
    #[arg(long)]
    pub(crate) skip_bad_rows: bool,
    /// Table of steps per second, or of models, for traces that give steps without durations
    /// (gavel, synergy)
    #[arg(long, value_name = "FILE")]
    pub(crate) throughputs: Option<PathBuf>,
    /// Table of speeds by CPU and host memory for each GPU: columns
    /// `model,cpus,mem_gb,rel_throughput`
    #[arg(long, value_name = "FILE")]
    pub(crate) sensitivity: Option<PathBuf>,
    /// The GPU model of --throughputs that is the reference
    #[arg(long, default_value = "v100", value_name = "KIND")]
    pub(crate) gpu_model: String,
    /// Read at most this many jobs
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

/// Truths that need no further input and that a blind run can have.
fn advice_truth_parser() -> clap::builder::PossibleValuesParser {
    let values = TRUTHS.iter().filter(|t| !matches!(t.name, "table" | "stages"));
    let values = values.map(|t| clap::builder::PossibleValue::new(t.name).help(t.summary));
    values.collect::<Vec<_>>().into()
}

/// Options of the simulation.
#[expect(clippy::struct_excessive_bools, reason = "each is a flag of its own")]
#[derive(Args, Debug, Clone, PartialEq)]
pub(crate) struct WorldArgs {
    /// Nodes x GPUs per node, with GPU models: 8x8 or 8x8:v100,4x8:a100/80g; `:96c:500g` adds CPU
    /// cores and GiB of memory per node
    #[arg(long, default_value = "8x8", value_parser = cluster)]
    pub(crate) cluster: Cluster,
    /// Use the rules of a published simulator
    #[arg(long, value_name = "NAME", value_parser = compat_parser())]
    pub(crate) compat: Option<String>,
    /// True interference between roommates
    #[arg(long, default_value = TRUTHS[0].name, conflicts_with = "compat")]
    #[arg(value_parser = truth_parser())]
    pub(crate) truth: String,
    /// Measurements for --truth measured|utilization: files PREFIX*.jsonl, or a folder; the
    /// built-in ones, unless given
    #[arg(long, value_name = "PREFIX", conflicts_with = "compat")]
    pub(crate) measurements: Option<PathBuf>,
    /// Speeds of pairs for --truth table: columns `a,b,speed_a,speed_b`, or Gavel's or Lucid's
    /// table
    #[arg(long, value_name = "FILE", conflicts_with = "compat", required_if_eq("truth", "table"))]
    pub(crate) pairs: Option<PathBuf>,
    /// Speeds of pairs that policies know: the file of --throughputs, or a table as for --pairs
    #[arg(long, value_name = "FILE", conflicts_with = "compat")]
    pub(crate) known_pairs: Option<PathBuf>,
    /// Relative scatter of true speeds around the interference model
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = chance)]
    #[arg(conflicts_with = "compat")]
    pub(crate) truth_noise: f64,
    /// Do not tell policies how long a step takes: they learn it from samples that scatter, as on a
    /// real machine. Those that know lengths still do
    #[arg(long, conflicts_with = "compat")]
    pub(crate) blind: bool,
    /// Relative scatter of samples with --blind
    #[arg(long, default_value_t = 0.05, value_name = "SHARE", value_parser = chance)]
    #[arg(requires = "blind")]
    pub(crate) blind_noise: f64,
    /// Most jobs on one GPU
    #[arg(long, default_value_t = Costs::USUAL_TENANTS, value_name = "N", value_parser = tenants())]
    pub(crate) max_tenants: u8,
    /// Seed of all random numbers
    #[arg(long, default_value_t = 0, allow_negative_numbers = true)]
    pub(crate) seed: u64,
    /// Seconds without progress when a job restarts
    #[arg(long, default_value_t = 62.0, value_name = "S", value_parser = seconds)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) restart_cost: f64,
    /// Seconds without progress when a suspended job resumes
    #[arg(long, default_value_t = 1.0, value_name = "S", value_parser = seconds)]
    pub(crate) resume_cost: f64,
    /// Seconds without progress when a job is moved; the restart cost, unless given
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(crate) migrate_cost: Option<f64>,
    /// Seconds without progress when a job's knobs change
    #[arg(long, default_value_t = 0.0, value_name = "S", value_parser = seconds)]
    pub(crate) tune_cost: f64,
    /// Seconds without progress at the first start
    #[arg(long, default_value_t = 0.0, value_name = "S", value_parser = seconds)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) start_cost: f64,
    /// Run gangs that are spread over nodes as fast as consolidated ones
    #[arg(long)]
    pub(crate) no_spread_penalty: bool,
    /// Mean hours between failures of a node; nodes do not fail unless given
    #[arg(long, value_name = "H", value_parser = hours, allow_negative_numbers = true)]
    pub(crate) node_mtbf: Option<f64>,
    /// Mean hours until a failed node is repaired
    #[arg(long, default_value_t = 1.0, value_name = "H", value_parser = hours)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) node_repair: f64,
    /// Probability that an attempt of a job crashes
    #[arg(long, default_value_t = 0.0, value_name = "P", value_parser = chance)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) crash: f64,
    /// Share of these crashes that are user errors, which recur at the same point of the work
    #[arg(long, default_value_t = 0.0, value_name = "SHARE", value_parser = chance)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) user_errors: f64,
    /// How often a job is retried after a failure of its own
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub(crate) retries: u16,
    /// How often a job is retried after a user error; as --retries, unless given
    #[arg(long, value_name = "N")]
    pub(crate) user_retries: Option<u16>,
    /// Minutes between checkpoints; a crash loses the progress since the last
    #[arg(long, default_value_t = 30.0, value_name = "MIN", value_parser = seconds)]
    #[arg(allow_negative_numbers = true)]
    pub(crate) checkpoint: f64,
    /// Length of the measuring window of services in seconds
    #[arg(long, default_value_t = 10.0, value_name = "S", value_parser = window)]
    pub(crate) window: f64,
    /// Simulate every request, instead of reusing windows that were simulated under the same
    /// conditions
    #[arg(long)]
    pub(crate) exact_requests: bool,
    /// A service closes a gate on the kernels of its roommates while a request would be late
    #[arg(long)]
    pub(crate) service_gate: bool,
    /// Measure only these jobs, by order of submission, and stop when the last of them ends:
    /// 4000:5000
    #[arg(long, value_name = "FROM:TO", value_parser = range)]
    pub(crate) measure: Option<Range<u32>>,
}

#[derive(Args, Debug)]
pub(crate) struct Sim {
    /// The trace, `-` for standard input, or a scenario (.toml); a small synthetic trace, unless
    /// given
    pub(crate) trace: Option<PathBuf>,
    /// The policy
    #[arg(long, short, default_value = "tiresias")]
    pub(crate) policy: String,
    /// Ask a policy of your own, in a process that listens on this Unix socket (see `roommate.lab`
    /// in the Python package)
    #[arg(long, value_name = "SOCKET", conflicts_with_all = ["policy", "set", "compat"])]
    pub(crate) policy_socket: Option<PathBuf>,
    /// Set a parameter of the policy: name=value, the value as JSON or plain text
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) input: TraceInput,
    #[command(flatten)]
    pub(crate) world: WorldArgs,
    /// Write the journal to this file (JSON lines; compressed if the name ends in .gz)
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// Also draw a Gantt chart of the GPUs
    #[arg(long)]
    pub(crate) gantt: bool,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Compare {
    /// The trace, `-` for standard input, or a scenario (.toml); a small synthetic trace, unless
    /// given
    pub(crate) trace: Option<PathBuf>,
    /// The policies, separated by commas, or `all`; those of the scenario, or one of each family,
    /// unless given
    #[arg(long, short, visible_alias = "policy", value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) policies: Vec<String>,
    /// Sort by this figure, named as in CSV; by mean completion time (`avg_jct_s`), unless given
    #[arg(long, value_name = "FIGURE")]
    pub(crate) sort: Option<String>,
    /// Print all figures of every policy, not only the most important
    #[arg(long)]
    pub(crate) wide: bool,
    /// Set a parameter of one policy: policy.name=value
    #[arg(long = "set", value_name = "POLICY.NAME=VALUE")]
    pub(crate) set: Vec<String>,
    #[command(flatten)]
    pub(crate) input: TraceInput,
    #[command(flatten)]
    pub(crate) world: WorldArgs,
    /// Number of seeds of a scenario, from 0; as in the scenario, unless given
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
pub(crate) struct AdviseTrace {
    /// The history: what sacct or kubectl printed, or any trace; `-` for standard input
    pub(crate) trace: PathBuf,
    /// The cluster, as for `compare`; guessed from what was in use, unless given
    #[arg(long, value_parser = cluster)]
    pub(crate) cluster: Option<Cluster>,
    /// The policies to try, separated by commas; a shortlist, unless given
    #[arg(long, short, visible_alias = "policy", value_delimiter = ',', value_name = "NAME,...")]
    pub(crate) policies: Vec<String>,
    /// The policy that is most like today's scheduler; the others are compared with it
    #[arg(long, default_value = advice::TODAY, value_name = "NAME")]
    pub(crate) today: String,
    /// Number of seeds: draws of what kind of work the jobs were, what a restart costs and how
    /// speeds scatter
    #[arg(long, default_value_t = 5, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(2..=1000))]
    pub(crate) seeds: u64,
    /// The first seed
    #[arg(long, default_value_t = 0, value_name = "N")]
    #[arg(value_parser = clap::value_parser!(u64).range(..=1_000_000_000))]
    pub(crate) seed: u64,
    /// How roommates disturb each other, separated by commas; each is tried with each seed
    #[arg(long, value_delimiter = ',', value_name = "NAME,...", default_values = advice::TRUTHS)]
    #[arg(value_parser = advice_truth_parser())]
    pub(crate) truths: Vec<String>,
    /// Simulate at most this many jobs in a row: of a longer history each seed draws a part
    #[arg(long, default_value_t = 2_000, value_name = "N", value_parser = some)]
    pub(crate) jobs: usize,
    /// Seconds without progress when a job restarts; drawn from 15 to 240, unless given
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(crate) restart_cost: Option<f64>,
    #[command(flatten)]
    pub(crate) input: TraceInput,
    /// Simulations at the same time; as many as there are cores, unless given
    #[arg(long, value_name = "N", value_parser = some)]
    pub(crate) threads: Option<usize>,
    /// Write an HTML report
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Bound {
    /// The trace, or `-` for standard input; a small synthetic trace, unless given
    pub(crate) trace: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) input: TraceInput,
    #[command(flatten)]
    pub(crate) world: WorldArgs,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Oracle {
    /// The scenario, with an [oracle] section
    pub(crate) scenario: PathBuf,
    /// Number of seeds, from 0; as in the scenario, unless given
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
    /// The journal to read; that of the daemon, unless given
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
    /// Describe this policy
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
    /// Title of the page
    #[arg(long, default_value = "Roommate")]
    pub(crate) title: String,
}

#[derive(Subcommand, Debug)]
pub(crate) enum Trace {
    /// Print statistics of a trace as in the Philly study: sizes, durations, arrivals, load,
    /// failures
    Stats {
        /// The trace, `-` for standard input
        trace: PathBuf,
        #[command(flatten)]
        input: TraceInput,
        /// The cluster, to compute the offered load
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
        /// GPU quota of a team, to distinguish waiting for quota from fragmentation
        #[arg(long, value_name = "TEAM=GPUS,...", value_delimiter = ',', value_parser = quota)]
        quota: Vec<(String, u32)>,
        /// Also write an HTML page with plots
        #[arg(long, value_name = "FILE")]
        report: Option<PathBuf>,
        /// How to print the result
        #[arg(long, short, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Generate a synthetic trace from published mixes of sizes and durations
    Synth(Synth),
    /// Convert a trace to Roommate's own format
    Convert {
        /// The trace, `-` for standard input
        trace: PathBuf,
        #[command(flatten)]
        input: TraceInput,
        /// Output file; .jsonl gives JSON lines, .gz is compressed
        #[arg(long, short, value_name = "FILE", default_value = "-")]
        output: PathBuf,
    },
}

#[derive(Subcommand, Debug)]
pub(crate) enum Profile {
    /// Measure commands that use the SDK: alone by batch size and SMs, and colocated
    Measure(Measure),
    /// Recommend how to run every measured set, or that sharing does not pay
    Advise(Advise),
    /// Fit models of tasks alone and colocated, and report their error on held-out measurements
    Fit {
        /// The measurements: every file PREFIX*.jsonl, or every .jsonl file of a folder
        prefix: PathBuf,
        /// How to print the result
        #[arg(long, short, value_enum, default_value_t = Output::Table)]
        output: Output,
    },
    /// Compare the predictions that a simulation uses with measured pairs
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
    /// The journal of a machine (`roommate run --journal`), plain or compressed, `-` for standard
    /// input
    pub(crate) journal: PathBuf,
    /// The measurements: every file PREFIX*.jsonl, or every .jsonl file of a folder
    #[arg(long, value_name = "PREFIX")]
    pub(crate) profiles: PathBuf,
    /// Seconds of a job outside its steps: from its launch to the first step, and from the last
    /// step to its end; as measured for its profile, unless given
    #[arg(long, value_name = "S", value_parser = seconds)]
    pub(crate) start: Option<f64>,
    /// Predict what this policy would have done with the same jobs; the policy of the run, unless
    /// given
    #[arg(long, short)]
    pub(crate) policy: Option<String>,
    /// Set a parameter of --policy: name=value, the value as JSON or plain text
    #[arg(long = "set", value_name = "NAME=VALUE", requires = "policy")]
    pub(crate) set: Vec<String>,
    /// Write the journal of the simulated run to this file
    #[arg(long, value_name = "FILE")]
    pub(crate) simulated: Option<PathBuf>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Measure {
    /// The plan: commands, batch sizes, SMs and sets
    #[arg(required_unless_present = "example", requires = "out")]
    pub(crate) plan: Option<PathBuf>,
    /// Output files: PREFIX.jsonl, and PREFIX-services.jsonl for services beside training. Existing
    /// rows are not measured again
    #[arg(long, value_name = "PREFIX")]
    pub(crate) out: Option<PathBuf>,
    /// Measure everything again and replace existing rows
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
    /// Largest slowdown of a task
    #[arg(long, value_name = "TIMES", default_value_t = 1.5, value_parser = at_least_one)]
    pub(crate) bound: f64,
    /// Least total throughput of a set, with 1 = one task at a time
    #[arg(long, value_name = "SUM", default_value_t = 1.1, value_parser = at_least_one)]
    pub(crate) least: f64,
    /// Throughput that a partition may lose against no partition, as a share of the latter
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = chance)]
    pub(crate) loss: f64,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Output::Table)]
    pub(crate) output: Output,
}

#[derive(Args, Debug)]
pub(crate) struct Synth {
    /// Number of jobs
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
    /// Requested GPU time, as a share of the GPU time of the cluster
    #[arg(long, default_value_t = 0.9, allow_negative_numbers = true)]
    pub(crate) load: f64,
    /// Share of jobs that can use two or four times the GPUs they request
    #[arg(long, default_value_t = 0.0, allow_negative_numbers = true)]
    pub(crate) elastic: f64,
    /// The cluster that the load refers to
    #[arg(long, default_value = "8x8", value_parser = cluster)]
    pub(crate) cluster: Cluster,
    /// Output file; .jsonl gives JSON lines, .gz is compressed
    #[arg(long, short, value_name = "FILE", default_value = "-")]
    pub(crate) output: PathBuf,
}

/// The defaults of `roommate sim`.
pub(crate) fn defaults() -> (WorldArgs, TraceInput) {
    match Cli::parse_from(["roommate", "sim"]).command {
        Command::Sim(sim) => (sim.world, sim.input),
        _ => unreachable!("the command is `sim`"),
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

/// A count; the upper limit keeps a typing error from exhausting memory.
fn some(text: &str) -> Result<usize, String> {
    let value = text.parse().ok().filter(|n| (1..=10_000_000).contains(n));
    value.ok_or_else(|| "expected a whole number from 1 to 10000000".into())
}

/// A team and its GPUs, split at the last `=`: names may contain any character.
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

/// A number of tenants of a GPU.
pub(crate) fn tenants() -> clap::builder::RangedI64ValueParser<u8> {
    clap::value_parser!(u8).range(1..=i64::from(Costs::MOST_TENANTS))
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
