/** The report of the messages section: figures, verdicts, and how they were measured. */
import { figure, verdict } from '../figures.js'
import { formatNumber } from '../number-format.js'
import type { Flowed } from '../programs/message-flow.js'
import { of } from '../rounds.js'
import type { BenchContext, Figure, Plot, SectionResult, Verdict } from '../section.js'
import { median, pairedRatio } from '../statistics.js'
import {
  endToEndPerSecond,
  fanOutGroups,
  fanOutItems,
  fanOutNames,
  fanOutPerSecond,
  fanOutSeconds,
} from './messages-delivery.js'
import {
  batch,
  batchConnections,
  batchLanes,
  consumers,
  fewPartitions,
  laneBatch,
  laneConsumers,
  manyPartitions,
  partitions,
  popNames,
  pushNames,
  type Rated,
  singleConnections,
} from './messages-rates.js'
import { growth, type Sample, type Stored, storageItems, storageRequestsPerSecond } from './messages-storage.js'

export interface Found {
  readonly pace: { readonly seconds: number; readonly endToEndSeconds: number; readonly storageSeconds: number }
  readonly pushing: ReadonlyMap<string, readonly Rated[]>
  readonly popping: ReadonlyMap<string, readonly Rated[]>
  readonly fanOut: ReadonlyMap<string, readonly Flowed[]>
  readonly endToEnd: Flowed
  readonly storage: Stored
  /** Messages of all loads on the rates' queues, each delivered exactly once. */
  readonly delivered: number
}

export function conclude(context: BenchContext, found: Found): SectionResult {
  return {
    figures: figuresOf(found),
    verdicts: verdictsOf(context, found),
    plots: [storagePlot(found.storage)],
    notes: notesOf(context, found),
  }
}

const perSecond = (rated: Rated): number => rated.perSecond

function figuresOf({ pace, pushing, popping, fanOut, endToEnd, storage }: Found): Figure[] {
  const ofRates =
    (rates: Found['pushing']) =>
    (what: string, unit: string, names: readonly string[], pick: (rated: Rated) => number): Figure[] =>
      names.map((variant) => figure({ what, variant, unit, runs: of(rates, variant).map(pick) }))
  const pushes = ofRates(pushing)
  const pops = ofRates(popping)
  const single = (what: string, variant: string, unit: string, value: number): Figure =>
    figure({ what, variant, unit, runs: [value] })
  const byOne = [pushNames.echo, pushNames.single, pushNames.few, pushNames.many]
  const own = [pushNames.single, pushNames.few, pushNames.many, pushNames.batch]
  const byBatch = [pushNames.batch, pushNames.rawOne, pushNames.rawSeveral]
  const consuming = [popNames.backlog, popNames.few, popNames.many]
  const flowing = `end to end at ${endToEndPerSecond}/s`
  const last = storage.samples.at(-1)
  return [
    ...pushes(`push, one message a request, ${singleConnections} connections`, '/s', byOne, perSecond),
    ...pushes(`push, ${batch} messages a request, ${batchConnections} connections`, '/s', byBatch, perSecond),
    ...pushes('answered 202 at that load', '%', own, (one) => one.queuedPercent),
    ...pushes('refused at that load', '%', own, (one) => one.refusedPercent),
    ...pushes('p99 of the answer at that load', 'ms', [...byOne, pushNames.batch], (one) => one.p99Ms),
    ...pushes('CPU time of the process for each push', 'µs', [...byOne, pushNames.batch], (one) => one.cpuUs),
    ...pops(
      `pop and ack, messages, ${batch} a pop`,
      '/s',
      [popNames.backlog, popNames.rawOne, popNames.rawSeveral],
      perSecond,
    ),
    ...pops(`pop and ack, messages, ${laneBatch} a pop`, '/s', [popNames.few, popNames.many], perSecond),
    ...pops('pop and its ack, p99', 'ms', consuming, (one) => one.p99Ms),
    ...pops('pops refused', '%', consuming, (one) => one.refusedPercent),
    ...pops('CPU time of the process for each message popped', 'µs', consuming, (one) => one.cpuUs),
    ...Object.values(fanOutNames).map((variant) =>
      figure({
        what: `deliveries while ${fanOutPerSecond} messages/s come`,
        ...{ variant, unit: '/s' },
        runs: of(fanOut, variant).map((one) => one.receivedDuring / fanOutSeconds(pace)),
      }),
    ),
    single(flowing, 'push due → received, p50', 'ms', endToEnd.receivedMs.p50),
    single(flowing, 'push due → received, p99', 'ms', endToEnd.receivedMs.p99),
    single(flowing, 'push due → answered, p99', 'ms', endToEnd.answeredMs.p99),
    single(flowing, 'refused', '', endToEnd.refused),
    single('tables of messages, at the end', 'size', 'MB', last?.megabytes ?? Number.NaN),
    single('tables of messages, at the end', 'dead tuples, last seen', '', last?.deadTuples ?? Number.NaN),
    single('tables of messages, at the end', 'messages left when all is consumed and swept', '', storage.left),
    single('tables of the operation queue, at the end', 'size', 'MB', last?.otherMegabytes ?? Number.NaN),
  ]
}

/** The better one: a ceiling is what can be reached. */
const ceiling = (rates: Found['pushing'], names: readonly string[]): number =>
  Math.max(...names.map((name) => median(of(rates, name).map(perSecond))))

function verdictsOf({ postgres }: BenchContext, found: Found): Verdict[] {
  const { pushing, popping, fanOut, endToEnd, storage } = found
  const atLeast = (what: string, value: number, unit: string, target: number, note?: string): Verdict =>
    verdict({ what: `messages: ${what}`, value, unit, rule: 'at-least', target, ...(note !== undefined && { note }) })
  const atMost = (what: string, value: number, unit: string, target: number, note?: string): Verdict =>
    verdict({ what: `messages: ${what}`, value, unit, rule: 'at-most', target, ...(note !== undefined && { note }) })
  const ratio = (rates: Found['pushing'], over: string, under: string): number =>
    pairedRatio(of(rates, over).map(perSecond), of(rates, under).map(perSecond))
  const deliveries = (name: string): number[] => of(fanOut, name).map((one) => one.receivedDuring)
  const batched = median(of(pushing, pushNames.batch).map(perSecond))
  const popped = median(of(popping, popNames.backlog).map(perSecond))
  return [
    atLeast('push of one over the bare echo', ratio(pushing, pushNames.single, pushNames.echo), '×', 0.6),
    atLeast(
      `push of ${batch} over INSERT of unnest`,
      batched / ceiling(pushing, [pushNames.rawOne, pushNames.rawSeveral]),
      '×',
      0.5,
    ),
    popVerdict(atLeast, popped, ceiling(popping, [popNames.rawOne, popNames.rawSeveral])),
    atMost(`end to end at ${endToEndPerSecond}/s, p99`, endToEnd.receivedMs.p99, 'ms', 50, refusedNote(endToEnd)),
    atLeast(
      `push with ${manyPartitions} partitions over ${fewPartitions}`,
      ratio(pushing, pushNames.many, pushNames.few),
      '×',
      0.7,
    ),
    atLeast(
      `pop and ack with ${manyPartitions} partitions over ${fewPartitions}`,
      ratio(popping, popNames.many, popNames.few),
      '×',
      0.7,
    ),
    atLeast(
      // A race through a backlog gave 1.7 and 2.5: see docs/decisions/speed.md.
      `deliveries to ${fanOutGroups} groups over one at a steady rate (who keeps up, not who is fastest)`,
      pairedRatio(deliveries(fanOutNames.many), deliveries(fanOutNames.one)),
      '×',
      5,
    ),
    atMost('left in the log once all is consumed and swept', storage.left, '', 0),
    ...storageVerdicts(atMost, postgres.settings, storage),
  ]
}

/** Of a machine that was too busy: the figure is of those that were accepted. */
function refusedNote({ pushed, refused, queued }: Flowed): string | undefined {
  if (refused + queued === 0) return undefined
  return `of ${pushed + refused} messages ${refused} were refused and ${queued} had to queue`
}

type Judge = (what: string, value: number, unit: string, target: number, note?: string) => Verdict

const wantedPopsPerSecond = 20_000

/** Either of the two is enough. The report shows the one that is met, or else the ratio. */
function popVerdict(atLeast: Judge, popped: number, raw: number): Verdict {
  const what = `pop and ack of ${batch}, ${partitions} partitions`
  const [rate, share] = [`${formatNumber(popped)}/s`, `${formatNumber(popped / raw)} × the SELECT of a range`]
  if (popped >= wantedPopsPerSecond) return atLeast(what, popped, '/s', wantedPopsPerSecond, `which is ${share}`)
  return atLeast(`${what}, over SELECT of a range`, popped / raw, '×', 0.5, `${rate}; 20,000/s would do as well`)
}

const growthMax = 1.5
/** Before the first vacuums everything grows. */
const vacuumsInFifth = 2

function storageVerdicts(atMost: Judge, settings: Readonly<Record<string, string>>, { samples }: Stored): Verdict[] {
  const naptimeSeconds = Number(/^(\d+)s$/.exec(settings.autovacuum_naptime ?? '')?.[1] ?? 60)
  const fifth = (samples.at(-1)?.seconds ?? 0) / 5
  if (fifth < naptimeSeconds * vacuumsInFifth) return []
  const note = 'the largest of the last fifth over that of the second fifth'
  const of = (what: string, pick: (sample: Sample) => number): Verdict =>
    atMost(`${what}, growth over the run`, growth(samples, pick), '×', growthMax, note)
  return [of('size of the tables', (one) => one.megabytes), of('dead tuples', (one) => one.deadTuples)]
}

function storagePlot({ samples }: Stored): Plot {
  const line = (name: string, pick: (sample: Sample) => number): Plot['series'][number] => ({
    name,
    points: samples.map((sample) => [sample.seconds, pick(sample)] as const),
  })
  return {
    name: 'messages-storage',
    title: `${storageRequestsPerSecond * storageItems} messages a second, consumed and removed`,
    xLabel: 'seconds',
    yLabel: 'MB, and thousands of dead tuples',
    kind: 'lines',
    series: [line('tables of messages', (one) => one.megabytes), line('dead tuples', (one) => one.deadTuples / 1_000)],
  }
}

function notesOf({ load }: BenchContext, { pace, endToEnd, storage, delivered }: Found): string[] {
  const growthText = (pick: (sample: Sample) => number): string => formatNumber(growth(storage.samples, pick))
  return [
    `Payloads are 256 bytes of JSON. Spillway is the real \`spillway serve\` with default settings, and every queue has a consumer group while it is pushed to. Pushes: ${load.name} on the same machine, one request under way on each connection, ${partitions} partitions unless stated otherwise; ${batch} messages of a request are spread over ${batchLanes} partitions. Only messages that the log held when the push was answered (201) count, not queued (202) or refused ones; afterwards no fewer rows were found than were accepted.`,
    'The echo parses and validates the same body by the same schema, and its answer has the same status, headers and size.',
    `INSERT of unnest: a Node.js program that writes ${batch} rows a statement into a table with the columns, the key and the indexes of the real one, in the same database. SELECT of a range: it reads ${batch} rows by their key and moves a cursor, in one statement; Spillway's pop and ack are two requests, with a lease between them. Of one and of several connections the better one counts.`,
    `Pop and ack: ${consumers} consumers over HTTP in one process, each with one batch under way; with few and many partitions ${laneConsumers}, and ${laneBatch} messages a pop, because that is what each of the many holds. All ${formatNumber(delivered)} messages of these loads were delivered, each exactly once, or the section would have failed; the same holds for every group of the fan-out, for end to end and for storage.`,
    `End to end: an open loop (a Poisson process) for ${pace.endToEndSeconds} s, consumers that wait (\`wait=true\`), and times from when a push was due to when a consumer had read the message. Producers and consumers share a process, which used ${endToEnd.cores.toFixed(2)} cores and was ${endToEnd.lagMs.p99.toFixed(1)} ms late itself (p99).`,
    `Fan-out: ${fanOutPerSecond} messages a second in pushes of ${fanOutItems}, an open loop; each group has one consumer that waits. Deliveries count when they came before the last push was due.`,
    `Storage: ${storageRequestsPerSecond} pushes of ${storageItems} a second for ${pace.storageSeconds} s, consumed as they come, on a queue with retentionEnabled. The largest size of the last fifth of the run was ${growthText((one) => one.megabytes)} × that of the second fifth, dead tuples ${growthText((one) => one.deadTuples)} ×. A run that is too short for autovacuum to have come around is not judged; BENCH_STORAGE_SECONDS makes it as long as one likes.`,
  ]
}
