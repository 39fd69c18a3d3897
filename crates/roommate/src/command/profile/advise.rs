//! `roommate profile advise`: recommends a configuration for each measured set.

use super::{figure, show, words};
use crate::cli::Advise;
use crate::{console, measurements, table};
use roommate_core::measurement::advice::{self, Advice, Configuration, Constraints, Way};
use serde_json::{Value, json};

pub(super) fn run(args: &Advise) -> anyhow::Result<()> {
    let sessions = measurements::sessions(&args.prefix)?;
    let constraints = Constraints { bound: args.bound, least: args.least, loss: args.loss };
    let all = advice::advise(&sessions, constraints);
    if all.is_empty() {
        let what = format!("measurements {} have no sets", measurements::quoted(&args.prefix));
        let hint = "`roommate profile measure` measures the `sets` of a plan";
        return Err(console::advise(what, hint));
    }
    if args.output == crate::cli::Output::Csv {
        return console::print(&csv(&all));
    }
    let value = json!({
        "bound": args.bound,
        "least": args.least,
        "loss": args.loss,
        "shared": all.iter().filter(|a| a.choice.is_ok()).count(),
        "declined": all.iter().filter(|a| a.choice.is_err()).count(),
        "sets": all.iter().map(as_json).collect::<Vec<_>>(),
    });
    show(args.output, &value, || as_table(&all))
}

fn name(advice: &Advice) -> String {
    let names: Vec<String> =
        advice.set.iter().map(|task| format!("{}@{}", task.name, task.batch)).collect();
    names.join(" + ")
}

fn way(configuration: &Configuration, Advice { set, gpu, .. }: &Advice) -> String {
    let Way { first, sms } = &configuration.way;
    let part = |sms: &u32| if Some(*sms) == *gpu { "all".into() } else { sms.to_string() };
    let first = first.map(|i| format!("{} first", set[i].name));
    let parts = sms.as_ref().map(|sms| {
        let parts: Vec<String> = sms.iter().map(part).collect();
        parts.join("+") + " SMs"
    });
    match (first, parts) {
        (None, None) => "unconfined".into(),
        (Some(one), None) | (None, Some(one)) => one,
        (Some(first), Some(parts)) => format!("{parts} {first}"),
    }
}

/// The configuration shown in the row: the chosen one, or the best if none satisfies the
/// constraints.
fn best(advice: &Advice) -> Option<&Configuration> {
    advice.choice.as_ref().map_or_else(|_| advice.most(), |i| advice.configurations.get(*i))
}

fn decision(advice: &Advice) -> String {
    match &advice.choice {
        Ok(_) => "share".into(),
        Err(why) => format!("decline: {why}"),
    }
}

/// Total throughput, with its error if there were several rounds.
fn sum(configuration: &Configuration) -> String {
    let sum = format!("{:.2}", configuration.sum());
    if configuration.sum_error > 0.0 {
        format!("{sum} ±{:.2}", configuration.sum_error)
    } else {
        sum
    }
}

fn slowdowns(configuration: &Configuration) -> String {
    configuration.slowdowns().map(|s| format!("{s:.2}")).collect::<Vec<_>>().join(" ")
}

fn as_json(advice: &Advice) -> Value {
    let configuration = |w: &Configuration| {
        json!({
            "sms": w.way.sms,
            "first": w.way.first,
            "sum": w.sum(),
            "sum_error": w.sum_error,
            "speeds": w.speeds,
            "slowdowns": w.slowdowns().collect::<Vec<_>>(),
        })
    };
    json!({
        "tasks": advice.set.iter().map(|w| &w.name).collect::<Vec<_>>(),
        "batches": advice.set.iter().map(|w| w.batch).collect::<Vec<_>>(),
        "one_at_a_time": 1.0,
        "unconfined": advice.unconfined().map(configuration),
        "best": advice.choice.as_ref().ok().map(|i| configuration(&advice.configurations[*i])),
        "decision": if advice.choice.is_ok() { "share" } else { "decline" },
        "reason": advice.choice.as_ref().err().map(ToString::to_string),
        "ways": advice.configurations.iter().map(configuration).collect::<Vec<_>>(),
    })
}

fn as_table(all: &[Advice]) -> String {
    let head = ["set", "one at a time", "unconfined", "best", "sum", "slowdowns", "decision"];
    let mut rows = vec![words(head)];
    for advice in all {
        let or_dash = |v: Option<String>| v.unwrap_or_else(|| "-".into());
        rows.push(vec![
            name(advice),
            "1.00".into(),
            or_dash(advice.unconfined().map(sum)),
            or_dash(best(advice).map(|w| way(w, advice))),
            or_dash(best(advice).map(sum)),
            or_dash(best(advice).map(slowdowns)),
            decision(advice),
        ]);
    }
    let shared = all.iter().filter(|a| a.choice.is_ok()).count();
    format!("{}worth sharing a GPU: {shared} of {}\n", table::align_left(&rows), all.len())
}

fn csv(all: &[Advice]) -> String {
    let mut text =
        String::from("set,one_at_a_time,unconfined,best_way,sum,slowdowns,decision,reason\n");
    for advice in all {
        let shown = |w: Option<String>| w.unwrap_or_default();
        let reason = advice.choice.as_ref().err().map(ToString::to_string).unwrap_or_default();
        text += &format!(
            "{},1,{},{},{},{},{},\"{}\"\n",
            name(advice),
            shown(advice.unconfined().map(|w| figure(w.sum()))),
            shown(best(advice).map(|w| way(w, advice))),
            shown(best(advice).map(|w| figure(w.sum()))),
            shown(best(advice).map(slowdowns)),
            if advice.choice.is_ok() { "share" } else { "decline" },
            reason.replace('"', "\"\""),
        );
    }
    text
}
