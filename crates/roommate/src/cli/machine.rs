//! Flags of the commands that run or control jobs on this machine.

use clap::{Args, Subcommand, ValueEnum};
use roommate_agent::api::caller::group_id;
use roommate_agent::api::job_file::length_of;
use roommate_agent::daemon::USUAL_TENANTS;
use std::net::SocketAddr;
use std::path::PathBuf;

/// The folder of a daemon's state.
#[derive(Args, Debug, Clone)]
pub(crate) struct StateArg {
    /// Folder of the daemon's state; `$ROOMMATE_STATE`, or a folder under your home, unless given
    #[arg(long, value_name = "DIR")]
    pub(crate) state: Option<PathBuf>,
}

/// How to reach the daemon.
#[derive(Args, Debug, Clone)]
pub(crate) struct At {
    #[command(flatten)]
    pub(crate) state: StateArg,
    /// Reach the daemon at https://HOST:PORT#sha256=FINGERPRINT instead; `$ROOMMATE_SERVER`, unless
    /// given. The fingerprint of its certificate may also be in `$ROOMMATE_SERVER_FINGERPRINT`, or
    /// the certificate in the state
    #[arg(long, value_name = "URL", conflicts_with = "state")]
    pub(crate) server: Option<String>,
    /// File with the token for --server; `$ROOMMATE_HTTP_TOKEN`, or the one in the state, unless
    /// given
    #[arg(long, value_name = "FILE")]
    pub(crate) token_file: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum Listing {
    /// Table as text
    Table,
    /// Table with more columns
    Wide,
    /// One JSON document
    Json,
    /// One YAML document
    Yaml,
}

/// A mechanism that can be left out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Left {
    /// Services and jobs with priority go before others
    Priority,
    /// Services hold back the kernel launches of others
    Gate,
}

impl From<Left> for roommate_agent::device::Mechanism {
    fn from(left: Left) -> Self {
        match left {
            Left::Priority => Self::Priority,
            Left::Gate => Self::Gate,
        }
    }
}

/// Type of the devices that are shared.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum DeviceKind {
    /// CPU cores
    Cpu,
    /// NVIDIA GPUs
    Cuda,
}

/// Policy and devices of a machine.
#[derive(Args, Debug, Clone)]
pub(crate) struct Deciding {
    /// The policy; that of the mix or of the existing state, or roommate, unless given
    #[arg(long, short)]
    pub(crate) policy: Option<String>,
    /// Set a parameter of the policy: name=value, the value as JSON or plain text
    #[arg(long = "set", value_name = "NAME=VALUE")]
    pub(crate) set: Vec<String>,
    /// Devices to share; those of the existing state, or CPU cores, unless given
    #[arg(long, value_enum, value_name = "KIND")]
    pub(crate) device: Option<DeviceKind>,
    /// Number of devices; as many as the machine has cores or GPUs, unless given
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=1000))]
    pub(crate) devices: Option<u16>,
    /// Do not use a mechanism, to compare or where it makes trouble
    #[arg(long, value_name = "MECHANISM", value_delimiter = ',')]
    pub(crate) without: Vec<Left>,
    /// Do not use cgroups: tenants enforce their shares themselves
    #[arg(long)]
    pub(crate) no_cgroups: bool,
    /// Do not share cores with other daemons: refuse to start where another one uses them (GPUs are
    /// never shared)
    #[arg(long)]
    pub(crate) claim: bool,
    /// Seconds until a job is retried after its first failure; doubles with each further failure
    #[arg(long, value_name = "S", default_value_t = 5.0, value_parser = super::seconds)]
    pub(crate) backoff: f64,
    /// Most jobs on one device
    #[arg(long, default_value_t = USUAL_TENANTS, value_name = "N", value_parser = super::tenants())]
    pub(crate) max_tenants: u8,
    /// Seed of the policy's random numbers
    #[arg(long, default_value_t = 0)]
    pub(crate) seed: u64,
    /// Give the policy the results of `profile measure`: pairs, predictions and latency curves of
    /// every file PREFIX*.jsonl; jobs name their profile with `profile: TASK@BATCH`
    #[arg(long, value_name = "PREFIX")]
    pub(crate) profiles: Option<PathBuf>,
    /// File with what was learned of kinds of work in earlier runs, which is also written; that of
    /// the state, unless given
    #[arg(long, value_name = "FILE")]
    pub(crate) learned: Option<PathBuf>,
    /// Give the policy the sensitivity of these profiles to CPU and host memory: a table with
    /// columns `model,cpus,mem_gb,rel_throughput`
    #[arg(long, value_name = "FILE", requires = "profiles")]
    pub(crate) sensitivity: Option<PathBuf>,
}

#[derive(Args, Debug)]
pub(crate) struct Up {
    #[command(flatten)]
    pub(crate) state: StateArg,
    #[command(flatten)]
    pub(crate) deciding: Deciding,
    /// Serve all users of this machine, each with own jobs; for root
    #[arg(long)]
    pub(crate) system: bool,
    /// The group whose members may use the daemon; every user of the machine, unless given
    #[arg(long, value_name = "GROUP", requires = "system", value_parser = group)]
    pub(crate) group: Option<u32>,
    /// The group whose members are administrators like root
    #[arg(long, value_name = "GROUP", requires = "system", value_parser = group)]
    pub(crate) admins: Option<u32>,
    /// Also listen for HTTPS at this address; port 0 selects a free port
    #[arg(long, value_name = "ADDR:PORT")]
    pub(crate) http: Option<SocketAddr>,
    /// Do not encrypt at the --http address, which other machines must not be able to reach
    #[arg(long, requires = "http")]
    pub(crate) http_plain: bool,
    /// Set a limit for each user: jobs=N, devices=N (of all jobs), job-devices=N, share=PART,
    /// mib=N (of commands and environments), requests=N (at a time)
    #[arg(long, value_name = "NAME=VALUE")]
    pub(crate) quota: Vec<String>,
    #[command(flatten)]
    pub(crate) kept: Kept,
}

/// Limits on the logs and journals that a daemon keeps.
#[derive(Args, Debug, Clone)]
pub(crate) struct Kept {
    /// MiB after which a job's log is rotated
    #[arg(long, value_name = "MIB", default_value_t = 16.0, value_parser = mib)]
    pub(crate) log_mib: f64,
    /// Rotated parts of a log that are kept
    #[arg(long, value_name = "N", default_value_t = 4)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) log_parts: u16,
    /// Days for which the logs of ended jobs are kept
    #[arg(long, value_name = "DAYS", default_value_t = 14.0, value_parser = super::seconds)]
    pub(crate) keep_days: f64,
    /// MiB of logs of ended jobs that are kept; the oldest are deleted first
    #[arg(long, value_name = "MIB", default_value_t = 4096.0, value_parser = mib)]
    pub(crate) keep_mib: f64,
    /// MiB after which a new journal file is started while no job is alive; four times as many
    /// while jobs are alive
    #[arg(long, value_name = "MIB", default_value_t = 16.0, value_parser = mib)]
    pub(crate) journal_mib: f64,
    /// Earlier journal files that are kept
    #[arg(long, value_name = "N", default_value_t = 8)]
    #[arg(value_parser = clap::value_parser!(u16).range(1..))]
    pub(crate) journal_parts: u16,
}

fn group(text: &str) -> Result<u32, String> {
    group_id(text).ok_or_else(|| "there is no such group".into())
}

fn mib(text: &str) -> Result<f64, String> {
    let value = text.parse::<f64>().ok().filter(|v| (0.001..=1e9).contains(v));
    value.ok_or_else(|| "expected a number from 0.001 to 1e9".into())
}

#[derive(Args, Debug)]
pub(crate) struct Submit {
    /// The job files, `-` for standard input
    #[arg(required_unless_present = "example")]
    pub(crate) files: Vec<PathBuf>,
    /// Print a job file that shows every field
    #[arg(long, conflicts_with = "files")]
    pub(crate) example: bool,
    /// Also pass this variable of your environment to the job, such as `WANDB_API_KEY` or `AWS_*`;
    /// `PATH`, `HOME`, `PYTHON*`, `LD_LIBRARY_PATH` and the like are passed anyway
    #[arg(long, value_name = "NAME")]
    pub(crate) env: Vec<String>,
    /// Pass your whole environment to the job
    #[arg(long)]
    pub(crate) env_all: bool,
    /// Check everything, submit nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Ps {
    /// Leave out jobs that have ended
    #[arg(long)]
    pub(crate) alive: bool,
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct Top {
    /// Print one frame as text and exit; also if standard output is not a terminal
    #[arg(long)]
    pub(crate) once: bool,
    /// Size of the printed frame in columns and rows; as high as it needs to be, unless given
    #[arg(long, value_name = "WxH", value_parser = size, requires = "once")]
    pub(crate) size: Option<(u16, u16)>,
    /// Seconds between updates
    #[arg(long, value_name = "S", default_value_t = 1.0, value_parser = pause)]
    pub(crate) every: f64,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Ui {
    /// Journals to show instead of a daemon; two are shown side by side
    #[arg(value_name = "JOURNAL", num_args = 0..=2)]
    pub(crate) journals: Vec<PathBuf>,
    /// Address of this machine at which the page is served; port 0 selects a free port
    #[arg(long, value_name = "ADDR:PORT", default_value = "127.0.0.1:0")]
    pub(crate) listen: SocketAddr,
    /// Print the address of the page, and do not open a browser
    #[arg(long)]
    pub(crate) no_open: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

fn size(text: &str) -> Result<(u16, u16), String> {
    let both = text.split_once('x').and_then(|(w, h)| Some((w.parse().ok()?, h.parse().ok()?)));
    let sane = both.filter(|(w, h)| (1..=1000).contains(w) && (1..=1000).contains(h));
    sane.ok_or_else(|| "expected columns and rows, like 80x24".into())
}

fn pause(text: &str) -> Result<f64, String> {
    let seconds = super::seconds(text)?;
    if seconds < 0.1 { Err("expected at least 0.1".into()) } else { Ok(seconds) }
}

#[derive(Args, Debug)]
pub(crate) struct Describe {
    /// Name of the job; without one, the machine
    pub(crate) job: Option<String>,
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct Logs {
    /// Name of the job
    pub(crate) job: String,
    /// Follow the output until the job ends
    #[arg(long, short)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct OnJobs {
    /// Names of the jobs
    #[arg(required = true)]
    pub(crate) jobs: Vec<String>,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Resize {
    /// Name of the job
    pub(crate) job: String,
    /// The batch size; 0 leaves it to the policy again
    #[arg(long, value_name = "N", required_unless_present = "share")]
    pub(crate) batch: Option<u32>,
    /// Largest share of each of its devices, 0 to 1; 0 leaves it to the policy again
    #[arg(long, value_name = "PART", value_parser = super::chance)]
    pub(crate) share: Option<f64>,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Events {
    /// Follow new events
    #[arg(long, short)]
    pub(crate) follow: bool,
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result; json prints the lines of the journal
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct Down {
    /// Stop the jobs as well; otherwise they keep running, and the next daemon adopts them
    #[arg(long)]
    pub(crate) stop_jobs: bool,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Args, Debug)]
pub(crate) struct Doctor {
    #[command(flatten)]
    pub(crate) state: StateArg,
    /// Repair what can be repaired; damaged files are kept under other names
    #[arg(long)]
    pub(crate) repair: bool,
}

#[derive(Args, Debug)]
pub(crate) struct ShowLearned {
    #[command(flatten)]
    pub(crate) state: StateArg,
    /// The file to read; that of the state, unless given
    #[arg(long, value_name = "FILE")]
    pub(crate) file: Option<PathBuf>,
    /// Remove it, while no daemon runs
    #[arg(long)]
    pub(crate) forget: bool,
    /// How to print it
    #[arg(long, short, value_enum, default_value_t = crate::cli::Output::Table)]
    pub(crate) output: crate::cli::Output,
}

#[derive(Args, Debug)]
pub(crate) struct Run {
    /// The mix: a list of jobs, and the policy
    pub(crate) mix: PathBuf,
    #[command(flatten)]
    pub(crate) deciding: Deciding,
    /// Run the mix with one job per device first (all devices, first come, first served), and
    /// compare
    #[arg(long)]
    pub(crate) versus_exclusive: bool,
    /// Predict with the simulator when each job ends, from its solo speed, and compare; runs the
    /// jobs one at a time first, unless --profiles is given
    #[arg(long)]
    pub(crate) predict: bool,
    /// Seconds of a job outside its steps, for --predict with --profiles; as measured, unless given
    #[arg(long, value_name = "S", value_parser = super::seconds, requires = "profiles")]
    pub(crate) start: Option<f64>,
    /// Write the journal to this file (JSON lines; compressed if the name ends in .gz)
    #[arg(long, value_name = "FILE")]
    pub(crate) journal: Option<PathBuf>,
    /// Write an HTML report
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = super::Output::Table)]
    pub(crate) output: super::Output,
}

/// Create, list and revoke tokens for HTTP.
#[derive(Subcommand, Debug)]
pub(crate) enum Token {
    /// Create a token, and print it once
    Create(TokenCreate),
    /// List your tokens; an administrator sees those of all users
    List(TokenList),
    /// Revoke tokens, at once
    Revoke(TokenRevoke),
}

#[derive(Args, Debug)]
pub(crate) struct TokenCreate {
    /// The user whose rights it carries; only an administrator names another
    #[arg(long = "for", value_name = "USER")]
    pub(crate) user: Option<String>,
    /// How much of these rights it carries
    #[arg(long, value_enum, default_value_t = TokenScope::Operate)]
    pub(crate) scope: TokenScope,
    /// When it expires, from now on: 90s, 15m, 12h or 30d
    #[arg(long, value_name = "TIME", default_value = "30d", value_parser = length)]
    pub(crate) expires: f64,
    /// What it is for, in your words
    #[arg(long)]
    pub(crate) name: Option<String>,
    #[command(flatten)]
    pub(crate) at: At,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum)]
pub(crate) enum TokenScope {
    /// See own jobs, their output and the machine
    Read,
    /// Also submit and change own jobs
    Operate,
    /// Everything that the user may do
    Admin,
}

fn length(text: &str) -> Result<f64, String> {
    length_of(text).ok_or_else(|| "expected a time like 12h or 30d".into())
}

#[derive(Args, Debug)]
pub(crate) struct TokenList {
    #[command(flatten)]
    pub(crate) at: At,
    /// How to print the result
    #[arg(long, short, value_enum, default_value_t = Listing::Table)]
    pub(crate) output: Listing,
}

#[derive(Args, Debug)]
pub(crate) struct TokenRevoke {
    /// Ids of the tokens, as `roommate token list` shows them
    #[arg(required = true)]
    pub(crate) ids: Vec<String>,
    #[command(flatten)]
    pub(crate) at: At,
}

/// Internal: the supervisor between daemon and job.
#[derive(Args, Debug)]
pub(crate) struct Keeper {
    /// Folder of the attempt
    pub(crate) folder: PathBuf,
    /// Become the command of the attempt, as a child of the supervisor with this process id
    #[arg(long = "for", value_name = "PID")]
    pub(crate) keeper: Option<u32>,
}

/// Internal: the front of a service, which starts its worker.
#[derive(Args, Debug)]
pub(crate) struct Front {
    /// The service, as JSON
    #[arg(long, value_name = "JSON")]
    pub(crate) spec: String,
    /// The command of the worker
    #[arg(last = true, required = true)]
    pub(crate) command: Vec<String>,
}

/// Internal: the daemon runs this to test what a process can do on a GPU.
#[derive(Args, Debug)]
pub(crate) struct GpuTest {
    /// Index of the GPU among the visible ones
    #[arg(long, default_value_t = 0)]
    pub(crate) device: u32,
    /// Try to allocate this much, which should exceed a memory limit; 0 = do not try
    #[arg(long, value_name = "MIB", default_value_t = 0)]
    pub(crate) over_mib: u64,
}
