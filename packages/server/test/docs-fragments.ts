/** Makes modules of the fragments of a page, which have the names of docs-context.ts. */
import { execFile } from 'node:child_process'
import { fileURLToPath } from 'node:url'
import { promisify } from 'node:util'
import type { Block } from './docs-page.js'
import { fileOf, writeIn } from './docs-programs.js'

const root = fileURLToPath(new URL('../../../', import.meta.url))
const context = fileURLToPath(new URL('docs-context.ts', import.meta.url))

/** A module with a function that runs the fragment. Its own names may be those of the context. */
function moduleOf(fragment: string, body: string): string {
  const imports = [...fragment.matchAll(/^import .*$/gm)].map(([line]) => line)
  return `${imports.join('\n')}
${/^import Type /m.test(fragment) ? '' : "import Type from 'typebox'"}
import type { FragmentNames } from '${context}'
export default async ({ url, pool, intake, placeOrder, order, origin, until }: FragmentNames, same: (actual: unknown, wanted: unknown, line: string) => void) => {
  void [Type, url, pool, intake, placeOrder, order, origin, until, same]
  {
${body.replaceAll(/^import .*\n/gm, '')}
  }
}
`
}

/** `expression // → value`, also behind `const name =`. */
function asserting(fragment: string): string {
  return fragment.replaceAll(
    /^( *)(const (\w+) = )?(.*?)\s*\/\/ → (.*)$/gm,
    (line, space, assigned, name, expression, value) => {
      const compared = (actual: string): string => `same(${actual}, ${value}, ${JSON.stringify(line.trim())})`
      return assigned === undefined
        ? `${space}${compared(expression)}`
        : `${space}const ${name} = ${expression}; ${compared(name)}`
    },
  )
}

/** The file that runs this fragment; `createIntake` in it is one that the test closes. */
export function writeFragment(folder: string, name: string, { text }: Block): Promise<string> {
  const own = text.replace(/^import \{(.*)\} from 'spillway'$/m, (line, names: string) =>
    names.includes('createIntake')
      ? `${line.replace(/\bcreateIntake,? ?/, '')}\nimport { openIntake as createIntake } from '${context}'`
      : line,
  )
  return writeIn(folder, `${name}.ts`, moduleOf(own, asserting(own)))
}

/** A folder for the page's code, whatever path leads to the page. */
export const folderOf = (page: string): string => page.replace(/\.md$/, '').replaceAll(/\W+/g, '-')

/** What the compiler says of the `ts` blocks of these pages, as strict as in our own code. */
export async function compileAll(folder: string, pages: Readonly<Record<string, readonly Block[]>>): Promise<string> {
  for (const [page, blocks] of Object.entries(pages)) {
    const place = folderOf(page)
    for (const block of blocks.filter(({ language }) => language === 'ts')) {
      const file = fileOf(block)
      if (file !== undefined) await writeIn(folder, `${place}/${file}`, block.text)
      else await writeIn(folder, `${place}/line-${block.line}.ts`, moduleOf(block.text, block.text))
    }
  }
  const options = {
    extends: `${root}tsconfig.base.json`,
    compilerOptions: {
      ...{
        noEmit: true,
        composite: false,
        incremental: false,
        declaration: false,
        declarationMap: false,
        sourceMap: false,
      },
      allowImportingTsExtensions: true,
    },
    include: ['**/*.ts'],
  }
  await writeIn(folder, 'tsconfig.json', JSON.stringify(options))
  const compiler = `${root}node_modules/typescript/bin/tsc`
  const run = promisify(execFile)(process.execPath, [compiler, '-p', folder])
  return run.then(
    ({ stdout }) => stdout,
    (fault: { stdout?: string }) => fault.stdout ?? String(fault),
  )
}
