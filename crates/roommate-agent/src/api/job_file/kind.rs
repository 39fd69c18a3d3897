//! Kinds of work by name: a command without what differs from job to job.

use super::{Command, JobFile};
use roommate_core::math::hash::fnv1a;
use std::path::Path;

/// Parts of the names of options whose values say nothing of how a job uses its devices, or are
/// nobody's business.
const VARIES: &[&str] = &[
    "seed",
    "lr",
    "rate",
    "wd",
    "decay",
    "momentum",
    "steps",
    "epochs",
    "iters",
    "iterations",
    "out",
    "output",
    "log",
    "logs",
    "logdir",
    "dir",
    "run",
    "name",
    "id",
    "tag",
    "port",
    "save",
    "resume",
    "restore",
    "ckpt",
    "checkpoint",
    "checkpoints",
    "ticks",
    "token",
    "key",
    "password",
    "secret",
];
/// Longer names end in a checksum.
const LONGEST: usize = 100;
/// Longer words are code, and become a checksum.
const LONGEST_WORD: usize = 48;

/// The kind of work of a job that names no profile.
pub(super) fn of(file: &JobFile) -> String {
    let words = match &file.command {
        Command::Line(line) => line.split_whitespace().map(String::from).collect(),
        Command::Words(words) => words.clone(),
    };
    let mut kept: Vec<String> = Vec::new();
    let mut words = words.iter().map(String::as_str).peekable();
    while let Some(word) = words.next() {
        let (option, value) = word.split_once('=').map_or((word, None), |(o, v)| (o, Some(v)));
        if option.starts_with('-') && varies(option) {
            if value.is_none() {
                words.next_if(|next| !next.starts_with('-'));
            }
            continue;
        }
        kept.push(match value.filter(|_| option.starts_with('-')) {
            Some(value) => format!("{option}={}", short(value)),
            None => short(word),
        });
    }
    let batch = file.batch.map(|b| format!("@{}", b.size));
    let devices = (file.devices > 1).then(|| format!("on {}", file.devices));
    // What the file declares of its steps is part of its profile, which all jobs of a kind share.
    let declared = file.step_s.is_some() || file.stages_s.is_some();
    let declared = declared.then(|| sum(&format!("{:?} {:?}", file.step_s, file.stages_s)));
    kept.extend([batch, devices, declared].into_iter().flatten());
    let name = kept.join(" ");
    if name.is_empty() {
        return file.name().into();
    }
    match name.char_indices().nth(LONGEST) {
        Some((at, _)) => format!("{}... {}", &name[..at], sum(&name)),
        None => name,
    }
}

fn varies(option: &str) -> bool {
    let name = option.trim_start_matches('-').to_ascii_lowercase();
    name.split(['-', '_']).any(|part| VARIES.contains(&part))
}

/// A word as it is in a name: of a path the last part, of code a checksum.
fn short(word: &str) -> String {
    if word.len() > LONGEST_WORD || word.contains(char::is_control) {
        return sum(word);
    }
    let last = Path::new(word).file_name().and_then(|n| n.to_str());
    last.filter(|_| word.contains('/')).unwrap_or(word).into()
}

fn sum(text: &str) -> String {
    format!("#{:08x}", fnv1a(text.as_bytes()) as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(text: &str) -> String {
        JobFile::read(text, Path::new("/a/job.yaml")).unwrap().kind()
    }

    #[test]
    fn what_differs_from_job_to_job_is_no_part_of_a_kind() {
        let a = "command: [/usr/bin/python3, ./train.py, --seed, '1', --lr=0.1, --batch, '64']";
        let b = "command: [python3, /home/a/train.py, --batch, '64', --out-dir, /b/x, --resume]";
        assert_eq!(kind(a), "python3 train.py --batch 64");
        assert_eq!(kind(b), kind(a));
        assert_ne!(kind(&a.replace("64", "128")), kind(a));
        assert_eq!(kind("command: python3 train.py --batch 64 --epochs 3"), kind(a));
        assert!(!kind("command: [run, --api-key, abcdef]").contains("abcdef"));
    }

    #[test]
    fn declared_things_and_profiles_count() {
        let plain = "command: [python3, train.py]";
        assert_eq!(kind(&format!("{plain}\nprofile: mine")), "mine");
        let batch = format!("{plain}\nbatch: {{size: 64, min: 8, max: 128}}\ndevices: 2");
        assert_eq!(kind(&batch), "python3 train.py @64 on 2");
        assert_ne!(kind(&format!("{plain}\nstep_s: 2")), kind(plain));
        let code = "x".repeat(2000);
        assert!(kind(&format!("command: [python3, -c, {code}]")).len() < 40);
        let long = (0..200).map(|n| format!("w{n}")).collect::<Vec<_>>().join(" ");
        assert!(kind(&format!("command: {long}")).len() < 2 * LONGEST);
    }
}
