/** `createIntake`: checks the options, connects to the database, and says what is wrong if it cannot. */
import {
  checkOptions,
  either,
  isBoolean,
  isFunction,
  methods,
  OptionError,
  oneOf,
  type Rule,
  shown,
  timerMsMax,
  wholeNumber,
} from '../core/options.js'
import { type IntakeLog, type IntakeSettings, intakeDefaults } from '../core/settings.js'
import { stderrLog } from '../core/stderr-log.js'
import { createMetrics, type Metrics } from '../metrics/metrics.js'
import type { Store } from '../store/port.js'
import { withDeadline } from '../time/with-deadline.js'
import type { Identify } from './define.js'
import { Intake } from './intake.js'

export interface IntakeOptions extends Partial<IntakeSettings> {
  store: Store | Promise<Store>
  /** Default: warnings and errors go to stderr. */
  log?: IntakeLog
  metrics?: Metrics
  /**
   * Who asks, for definitions that do not say it themselves, and for the ticket routes. Default: the authenticated user, else
   * the client's address.
   */
  identity?: Identify
  /**
   * True: wait for the database, and throw if it cannot be used within `connectTimeoutMs`. `'forever'`: wait until it can.
   * False: return at once, and refuse with 503 until it can. Default true.
   */
  waitForStore?: boolean | 'forever'
  /** Default 10,000. */
  connectTimeoutMs?: number
}

const connectTimeoutMsDefault = 10_000
const milliseconds = wholeNumber(1, timerMsMax)

/** All but the store. */
export const intakeRules: Record<Exclude<keyof IntakeOptions, 'store'>, Rule> = {
  log: methods('debug', 'info', 'warn', 'error'),
  metrics: (value) =>
    typeof value === 'object' && value !== null && 'admissions' in value
      ? null
      : 'what createMetrics(registry) returns',
  identity: isFunction,
  waitForStore: either(isBoolean, oneOf('forever')),
  connectTimeoutMs: milliseconds,
  role: oneOf('accept', 'direct', 'work', 'both'),
  concurrency: wholeNumber(1, 100_000),
  leaseMs: wholeNumber(1_000, 3_600_000),
  directWaitMs: wholeNumber(0, timerMsMax),
  retryBaseMs: milliseconds,
  retryMaxMs: milliseconds,
  retentionMs: wholeNumber(0),
  idempotencyTtlMs: wholeNumber(1),
  pendingMax: wholeNumber(1),
  acceptWaitBudgetMs: milliseconds,
  busyQueueAbove: (value) => (typeof value === 'number' && value >= 0 ? null : 'a number of at least 0'),
  storeTimeoutMs: milliseconds,
  drainMs: wholeNumber(0, timerMsMax),
  pressureLoopDelayMs: milliseconds,
  pressureInflightMax: wholeNumber(1),
}

/** `now`: monotonic milliseconds, for tests. */
export async function openIntake(options: IntakeOptions, now?: () => number): Promise<Intake> {
  checkOptions('createIntake', options, { store: () => null, ...intakeRules })
  const {
    store,
    log,
    metrics,
    identity,
    waitForStore = true,
    connectTimeoutMs = connectTimeoutMsDefault,
    ...settings
  } = options
  const usableStore = await usable(store)
  // Takes longer than connecting, which happens at the same time.
  const loaded = loadTypebox()
  loaded.catch(() => undefined)
  const intake = new Intake({
    store: usableStore,
    settings: { ...intakeDefaults, ...defined(settings) },
    log: log ?? stderrLog,
    metrics: metrics ?? createMetrics(),
    ...(identity && { identity }),
    ...(now && { now }),
  })
  if (waitForStore === true) await connect(intake, connectTimeoutMs)
  else {
    const started = intake.start()
    if (waitForStore === 'forever') await started
    else started.catch((fault: unknown) => intake.log.error({ err: fault }, 'the database cannot be used'))
  }
  try {
    await loaded
  } catch (fault) {
    await intake.close()
    throw fault
  }
  return intake
}

const defined = (settings: Partial<IntakeSettings>): Partial<IntakeSettings> =>
  Object.fromEntries(Object.entries(settings).filter(([, value]) => value !== undefined))

async function usable(store: unknown): Promise<Store> {
  const found: unknown = await store
  if (methods('migrate', 'accept', 'close')(found) === null) return found as Store
  throw new OptionError(`createIntake: store must be postgres({ url }) or embedded(); given: ${shown(found)}`)
}

/** Throws within the time, with the reason; nothing is left running then. */
async function connect(intake: Intake, timeoutMs: number): Promise<void> {
  const deadline = performance.now() + timeoutMs
  const started = intake.start((fault) => performance.now() < deadline && !isRefused(fault))
  // The deadline may come first; then this end is of no interest.
  started.catch(() => undefined)
  try {
    await withDeadline(started, timeoutMs, () => {
      throw intake.presence.fault ?? new Error('no answer')
    })
  } catch (fault) {
    await intake.close()
    throw isAboutConnection(fault) ? new ConnectFault(intake.store.address, timeoutMs, fault) : fault
  }
}

export class ConnectFault extends Error {
  override readonly name = 'ConnectFault'
  readonly code = 'store_unavailable'

  constructor(address: string, timeoutMs: number, cause: unknown) {
    super(
      `createIntake: the database ${address} cannot be used: ${reasonOf(cause)}. ` +
        `Check the url, or raise connectTimeoutMs (${timeoutMs}); waitForStore: 'forever' waits for it.`,
      { cause },
    )
  }
}

/** The driver's own message: it names the address, the user or the database, and never a password. */
function reasonOf(fault: unknown): string {
  if (fault instanceof AggregateError) return reasonOf(fault.errors[0])
  if (!(fault instanceof Error)) return String(fault)
  return fault.cause === undefined ? fault.message : reasonOf(fault.cause)
}

const stateOf = (fault: unknown): string => String((fault as { sqlState?: unknown }).sqlState ?? '')

/** Wrong user or password, or no such database: waiting does not help. */
const isRefused = (fault: unknown): boolean => stateOf(fault).startsWith('28') || stateOf(fault) === '3D000'

/** Other faults (a schema that is too new, a server that is too old) say themselves what to do. */
function isAboutConnection(fault: unknown): boolean {
  const code = (fault as { code?: unknown }).code
  return isRefused(fault) || code === undefined || code === 'unavailable' || code === 'timeout' || code === 'other'
}

/** Without typebox, `define` says what to install. Any other failure is an error. */
async function loadTypebox(): Promise<void> {
  await import('../http/typebox.js').catch((fault: unknown) => {
    if ((fault as { code?: unknown }).code !== 'ERR_MODULE_NOT_FOUND') throw fault
  })
}
